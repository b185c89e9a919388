"""Where a setting comes from, and what stops the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.errors import SettingsError
from tidemill.settings import load, rows


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tidemill.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_setting_is_a_flag_a_variable_and_a_line_of_the_file() -> None:
    """By one name, in three spellings."""
    for row in rows():
        assert row.flags[0] == "--" + row.name.replace("_", "-")
        assert row.env == "TIDEMILL_" + row.name.upper()
        assert load({row.name: row.default}, {}).sources[row.name] == "flag"


def test_a_flag_wins_over_a_variable_over_the_file(tmp_path: Path) -> None:
    """And the default is what nobody set."""
    toml = _file(tmp_path, "slots = 5\nthreads = 5\ngpu_layers = 5\n")
    env = {"TIDEMILL_SLOTS": "6", "TIDEMILL_THREADS": "6"}
    loaded = load({"slots": "7"}, env, toml)
    found = loaded.settings
    assert (found.slots, found.threads, found.gpu_layers, found.engine) == (7, 6, 5, "llama")
    assert loaded.sources["slots"] == "flag"
    assert loaded.sources["threads"] == "$TIDEMILL_THREADS"
    assert loaded.sources["gpu_layers"] == str(toml)
    assert loaded.sources["engine"] == "default"


def test_the_platform_s_port_wins(tmp_path: Path) -> None:
    """Over a flag, too: a platform that sets it connects nowhere else. Empty is none."""
    toml = _file(tmp_path, "listen_port = 3\n")
    env = {"PORT": "1", "TIDEMILL_LISTEN_PORT": "2"}
    loaded = load({"listen_port": "4"}, env, toml)
    assert (loaded.settings.listen_port, loaded.sources["listen_port"]) == (1, "$PORT")
    assert load({"listen_port": "4"}, {"PORT": ""}, toml).settings.listen_port == 4


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("slotz = 1\n", "Unknown setting 'slotz'"),
        ("[slotz]\na = 1\n", "Unknown setting 'slotz'"),
        ("slots = 'many'\n", "Bad value 'many' for setting 'slots'"),
        ("slots = -1\n", "Bad value -1 for setting 'slots'"),
        ("[engine]\na = 1\n", "setting 'engine'"),
        ("engine = 'magic'\n", "Expected one of llama, echo"),
        ("lease_seconds = inf\n", "Bad value inf for setting 'lease_seconds'"),
        ("slots = \n", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_stops_the_start(tmp_path: Path, toml: str, named: str) -> None:
    """With one sentence that names the setting and the file."""
    path = _file(tmp_path, toml)
    with pytest.raises(SettingsError) as caught:
        load({}, {}, path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"TIDEMILL_SLOTZ": "1"}, "Unknown setting TIDEMILL_SLOTZ"),
        ({"TIDEMILL_SLOTS": "many"}, "setting 'slots' ($TIDEMILL_SLOTS)"),
        ({"TIDEMILL_INSECURE": "perhaps"}, "setting 'insecure' ($TIDEMILL_INSECURE)"),
        ({"PORT": "web"}, "setting 'listen_port' ($PORT)"),
        ({"LOGOS_MAX_BATCH_REQUESTS": "0"}, "($LOGOS_MAX_BATCH_REQUESTS)"),
    ],
)
def test_a_variable_that_is_wrong_stops_the_start(
    tmp_path: Path, env: dict[str, str], named: str
) -> None:
    """Named as it was given, an alias by its own name."""
    with pytest.raises(SettingsError) as caught:
        load({}, env, _file(tmp_path, ""))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("LOGOS_BATCH_CAPABILITY_TTL_HOURS", 2.0, "batch_capability_ttl_hours"),
        ("LOGOS_BATCH_MODEL_ELIGIBILITY_TTL_DAYS", 3.0, "batch_model_eligibility_ttl_days"),
        ("LOGOS_BATCH_RECONCILE_INTERVAL_S", 4.0, "batch_reconcile_interval_s"),
        ("LOGOS_AZURE_BATCH_API_VERSION", "2025-04-01-preview", "azure_batch_api_version"),
        ("LOGOS_BATCH_LOCAL_CONCURRENCY", 5, "batch_local_concurrency"),
        ("LOGOS_MAX_BATCH_FILE_BYTES", 6, "max_batch_file_bytes"),
        ("LOGOS_MAX_BATCH_REQUESTS", 7, "max_batch_requests"),
    ],
)
def test_another_systems_variable_is_a_setting(
    tmp_path: Path, variable: str, value: object, setting: str
) -> None:
    """By the name that its users have in their scripts."""
    loaded = load({}, {variable: str(value)}, _file(tmp_path, ""))
    assert getattr(loaded.settings, setting) == value
    assert loaded.sources[setting] == f"${variable}"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"slotz": 1}, "Unknown setting 'slotz'"),
        ({"slots": "many"}, "setting 'slots' (flag)"),
        ({"validation": "never"}, "Expected one of upload, batch"),
    ],
)
def test_a_flag_that_is_wrong_stops_the_start(
    tmp_path: Path, flags: dict[str, object], named: str
) -> None:
    """Before anything is opened."""
    with pytest.raises(SettingsError) as caught:
        load(flags, {}, _file(tmp_path, ""))
    assert named in str(caught.value)
