"""transformers knows moq_hf's quantizer whichever of the two is imported first, and neither imports the other."""

import subprocess
import sys

import pytest

from moq_hf.registration import import_with

BEFORE = """
import sys
import moq_hf
assert not {"torch", "transformers"} & set(sys.modules), "import moq_hf imports them"
from transformers.quantizers import auto
"""
AFTER = """
import sys
from transformers.quantizers import auto
assert "moq" not in auto.AUTO_QUANTIZER_MAPPING
import moq_hf
"""
KNOWN = """
quantizer = auto.AUTO_QUANTIZER_MAPPING["moq"]
assert "moq" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
assert "moq_hf.callback" not in sys.modules
# Imported once more, as notebooks do.
for name in [name for name in sys.modules if name.startswith("moq_hf")]:
    del sys.modules[name]
import moq_hf
assert auto.AUTO_QUANTIZER_MAPPING["moq"] is sys.modules["moq_hf.hf_quantizer"].MoQHfQuantizer is not quantizer
"""


@pytest.mark.parametrize("first", [BEFORE, AFTER], ids=["moq_hf", "transformers"])
def test_either_may_come_first(first: str) -> None:
    done = subprocess.run([sys.executable, "-c", first + KNOWN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_there_already_is_not_waited_for() -> None:
    finders = list(sys.meta_path)
    import_with("transformers.quantizers.auto", "moq_hf.hf_quantizer")
    assert sys.meta_path == finders
