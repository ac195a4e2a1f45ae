"""The classifier that benchmarks train where they are given none, and those that they are given."""

from typing import Any

from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, PretrainedConfig

MINILM = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


def config_of(name: str | None, **options: Any) -> Any:
    """The config of a folder or Hub name; without one that of a small BERT."""
    return MINILM if name is None else AutoConfig.from_pretrained(name, **options)


def classifier(name: str | None, config: PretrainedConfig = MINILM, **options: Any) -> Any:
    """The model of a folder or Hub name; without one `config` with random weights."""
    kind = AutoModelForSequenceClassification
    return kind.from_config(config) if name is None else kind.from_pretrained(name, **options)
