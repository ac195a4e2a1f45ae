"""The Hub, when it does not answer, and the errors that users of run_glue_moq.py get to read."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger("run_glue_moq")

HUB_TIMEOUT = 3.0
# Why the Hub is not asked.
_reason = ""


class UserError(ValueError):
    """Something wrong with what the user gave; its text is what they get to read."""


def one_line(error: BaseException) -> str:
    """Give an error's text without its line ends; its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def _probe_hub(endpoint: str) -> str | None:
    """Ask the Hub for a sign of life; give the reason why there was none in `HUB_TIMEOUT` seconds, else None."""
    from huggingface_hub.utils import get_session

    reason = [f"no answer in {HUB_TIMEOUT:.0f} s"]

    def ask() -> None:
        try:
            get_session().head(endpoint, timeout=HUB_TIMEOUT)
            reason.clear()
        except Exception as err:
            reason[0] = one_line(err)

    # A thread, because the look-up of a name knows no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT + 0.5)
    return reason[0] if reason else None


def set_up_hub(names: Sequence[str | None], push: bool, token: str | None) -> None:
    """Work without the Hub if it does not answer at once, since its own retries take up to a minute.

    Args:
        names: what will be loaded and could be on the Hub; what lies on this machine is left alone.
        push: whether the run ends with an upload.
        token: the access token for it; None: the one that is logged in.

    Raises:
        UserError: an upload was asked for that cannot be done.
    """
    from huggingface_hub import constants, get_token

    if not push and all(name is None or Path(name).exists() for name in names):
        return
    if push and not (token or get_token()):
        raise UserError("--push_to_hub needs a token of the Hub: run `hf auth login` or give --hub_token")
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        why = _probe_hub(constants.ENDPOINT)
        if why is None:
            return
        reason = f"the Hub ({constants.ENDPOINT}) cannot be reached ({why})"
    if push:
        raise UserError(f"--push_to_hub: {reason}")
    logger.warning("%s; using what is in the local cache", reason)
    import datasets.config

    global _reason
    _reason = reason
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def unreachable(what: str, advice: str) -> str:
    """Give the message for `what` that is not in the cache while the Hub is out of reach; empty if it is not."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        return ""
    return f"{what} is not on this machine, and {_reason}; {advice}"
