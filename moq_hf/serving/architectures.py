"""The classes of transformers that a server has a model of its own for: language models and text encoders alone."""


def _names(causal: str, others: str) -> frozenset[str]:
    return frozenset({f"{stem}ForCausalLM" for stem in causal.split()} | set(others.split()))


# vLLM 0.32.0: model_executor/models/registry.py.
VLLM_MODELS = _names(
    """
    Afmoe Apertus Arcee Bloom Cohere Cohere2 Cohere2Moe Cwm Dbrx DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4
    Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba FlexOlmo GPTBigCode GPTJ GPTNeoX Gemma
    Gemma2 Gemma3 Gemma3n Gemma4 Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GptOss Granite GraniteMoe
    GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 HrmText HunYuanDenseV1 HunYuanMoEV1
    HyperCLOVAX Jais2 Jamba KimiLinear Laguna Lfm2 Lfm2Moe Llama Llama4 LongcatFlash Mamba Mamba2 Mellum
    MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3 Mistral Mixtral Nemotron NemotronH OPT Olmo Olmo2 Olmo3 OlmoHybrid
    Olmoe Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4Exp SeedOss SmolLM3 StableLm
    Starcoder2 VaultGemma Zamba2
    """,
    """
    BertForMaskedLM BertForSequenceClassification BertForTokenClassification BertModel
    GPT2ForSequenceClassification GPT2LMHeadModel Gemma3TextModel GteModel JambaForSequenceClassification
    LlamaModel MistralModel ModernBertForSequenceClassification ModernBertForTokenClassification ModernBertModel
    NomicBertModel Qwen2Model RobertaForMaskedLM RobertaForSequenceClassification RobertaForTokenClassification
    RobertaModel XLMRobertaForSequenceClassification XLMRobertaForTokenClassification XLMRobertaModel
    """,
)
# SGLang 0.5.23: EntryClass in srt/models/.
SGLANG_MODELS = _names(
    """
    Afmoe Apertus Arcee Cohere Cohere2 Cohere2Moe Dbrx DeepseekV2 DeepseekV3 DeepseekV32 DeepseekV4 Ernie4_5_Moe
    Exaone4 ExaoneMoe FalconH1 FalconMamba GPTBigCode GPTJ Gemma Gemma2 Gemma3 Gemma3n Gemma4 Glm4 Glm4Moe
    Glm4MoeLite GlmMoeDsa GptOss Granite GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA
    HYV3 HYV4 HrmText HunYuanDenseV1 HunYuanMoEV1 KimiLinear Laguna Lfm2 Lfm2Moe Llama Llama4 LongcatFlash Mamba
    Mamba2 Mellum MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3 Mistral Mixtral NemotronH OPT Olmo Olmo2 Olmoe
    Persimmon Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe StableLm Starcoder2 Zaya
    """,
    """
    BertForSequenceClassification BertModel GPT2LMHeadModel Gemma2ForSequenceClassification
    LlamaForSequenceClassification MistralModel Qwen2ForSequenceClassification Qwen3ForSequenceClassification
    Qwen3Model XLMRobertaForSequenceClassification XLMRobertaModel
    """,
)
# llama.cpp's converter: conversion/, its ModelBase.register.
GGUF_MODELS = _names(
    """
    Afmoe Apertus Arcee Bamba BitNet Bloom Cohere Cohere2 Cohere2Moe Dbrx DeepseekV2 DeepseekV3 DeepseekV32
    DeepseekV4 Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba GPTBigCode GPTNeoX
    Gemma Gemma2 Gemma3 Gemma3n Gemma4 Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GptOss Granite GraniteMoe
    GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 HrmText HunYuanDenseV1 HunYuanMoEV1
    Jais2 Jamba KimiLinear Laguna Lfm2 Lfm2Moe Llama Llama4 Mamba Mamba2 Mellum MiMoV2Flash MiniCPM3 MiniMaxM2
    Ministral3 Mistral Mixtral Nemotron NemotronH Olmo Olmo2 Olmo3 Olmoe Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe
    Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4Exp SeedOss SmolLM3 SolarOpen StableLm Starcoder2 Youtu
    """,
    """
    BertForMaskedLM BertForSequenceClassification BertModel BloomModel CamembertModel DistilBertForMaskedLM
    DistilBertForSequenceClassification DistilBertModel EuroBertModel GPT2LMHeadModel Gemma3TextModel Lfm2Model
    LlamaModel ModernBertForMaskedLM ModernBertForSequenceClassification ModernBertModel NomicBertModel
    Qwen2Model Qwen3Model RobertaForSequenceClassification RobertaModel T5EncoderModel UMT5Model
    XLMRobertaForSequenceClassification XLMRobertaModel
    """,
)
