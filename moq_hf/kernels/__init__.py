"""The Triton kernels. `triton_quant`, `triton_search` and `triton_inputs` launch them."""
