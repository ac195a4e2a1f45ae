"""The kernel against `quantizer`: natively on a CUDA device, elsewhere in Triton's interpreter."""

import subprocess
import sys

import torch

from moq_hf import quantizer, triton_quant


def test_needs_no_triton_to_be_imported() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from moq_hf import quantize_model, triton_quant\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "quantize_model(model, {'quantizer_kernel': True, 'quantize_bits': {'start_bits': 4, 'target_bits': 4}})\n"
        "assert 'bits=4' in repr(model) and not triton_quant.available(torch.device('cpu'))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_plain_pytorch_computes_on_a_cpu() -> None:
    assert triton_quant.backend(torch.randn(4, 8)) is quantizer
