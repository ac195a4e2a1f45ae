"""`MoQPlugin`, for axolotl: `plugins: [moq_hf.integrations.axolotl.MoQPlugin]` and `moq: w4` in its YAML."""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from ..callback import MoQCallback
from ..config import MoQConfig


class MoQArgs(BaseModel):
    """The plugin's keys in axolotl's YAML.

    Attributes:
        moq: A preset's name, the path of a JSON file, or a mapping of the config's keys.
    """

    moq: str | dict[str, Any]

    @field_validator("moq")
    @classmethod
    def _is_a_config(cls, source: str | dict[str, Any]) -> str | dict[str, Any]:
        """Check the config while axolotl reads its own keys, before it loads any data or model."""
        MoQConfig.load(source)
        return source


class MoQPlugin(BasePlugin):  # type: ignore[misc]
    """Adds a `MoQCallback` to every run of axolotl."""

    def get_input_args(self) -> str:
        """The class in which axolotl finds the keys."""
        return f"{__name__}.{MoQArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[MoQCallback]:
        """The callback with which the Trainer is built."""
        return [MoQCallback(cfg["moq"])]
