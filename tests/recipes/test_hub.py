"""Whether the hub is asked at all, and that nothing of it stays behind."""

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from recipes import hub


@pytest.mark.parametrize("answers", [True, False])
def test_the_cache_alone_is_read_where_the_hub_does_not_answer(monkeypatch, answers):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_answers", lambda name, kind: answers)
    with hub.cache_only_if_unreachable("someone/something", "model"):
        assert constants.HF_HUB_OFFLINE is not answers
    assert constants.HF_HUB_OFFLINE is False


def test_the_setting_comes_back_after_an_error(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_answers", lambda name, kind: False)
    with pytest.raises(OSError), hub.cache_only_if_unreachable("someone/something", "dataset"):
        raise OSError
    assert constants.HF_HUB_OFFLINE is False


def test_the_hub_is_not_asked_about_a_folder_or_where_it_is_switched_off(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "_answers", lambda name, kind: pytest.fail("the hub was asked"))
    with hub.cache_only_if_unreachable(str(tmp_path), "model"):
        pass
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.cache_only_if_unreachable("someone/something", "model"):
        assert constants.HF_HUB_OFFLINE is True


# Its constructor takes a response of whichever HTTP library this version of the client has.
NOT_FOUND = HfHubHTTPError.__new__(HfHubHTTPError)


@pytest.mark.parametrize(
    "error, answers",
    [
        (NOT_FOUND, True),
        (ConnectionError("no route"), False),
        (None, True),
    ],
)
def test_what_counts_as_an_answer(monkeypatch, error, answers):
    asked = []

    def repo_info(self, name, *, repo_type, timeout):
        asked.append((name, repo_type))
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    assert hub._answers("someone/something", "dataset") is answers
    assert asked == [("someone/something", "dataset")]
