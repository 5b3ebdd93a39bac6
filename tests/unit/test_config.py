"""Configuration: defaults, sources and their order, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandkasten.config import Config, ConfigError, Defaults, PoolSize
from sandkasten.config.files import KEYS, OLDER_SPELLINGS, env_name, load_config
from sandkasten.installation import SEARCH_PATH, find_file

ROOT = Path(__file__).resolve().parents[2]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sandkasten.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_nothing_given_means_the_documented_defaults() -> None:
    """An empty environment and no file give the defaults of the HTTP contract."""
    config = load_config(environ={})
    assert config == Config()
    assert (config.listen, config.api_key, config.data_dir) == (("127.0.0.1:8080",), None, Path("/var/lib/sandkasten"))
    assert (config.default_image, config.allowed_images, config.session_ttl_seconds) == ("python", (), 1800)
    assert config.db_path == Path("/var/lib/sandkasten/sandkasten.db")
    assert config.defaults == Defaults(1.0, 512, 256, 2048, 200_000, 120_000, "none", False, "stateful", "bash")
    assert (config.security.seccomp, config.pool.enabled, config.sessions_on_stop) == ("strict", False, "auto")
    assert dict(config.image_aliases) == {"python": "host", "base": "host"}


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("listen", "SANDKASTEN_LISTEN"),
        ("defaults.cpu_limit", "SANDKASTEN_CPU_LIMIT"),
        ("defaults.network_mode", "SANDKASTEN_NETWORK_MODE"),
        ("security.seccomp", "SANDKASTEN_SECCOMP"),
        ("pool.enabled", "SANDKASTEN_POOL_ENABLED"),
        ("server.max_sessions", "SANDKASTEN_SERVER_MAX_SESSIONS"),
    ],
)
def test_environment_names_follow_one_rule(key: str, name: str) -> None:
    """Top-level keys, `defaults` and `security` use the last part; other sections are part of the name."""
    assert env_name(key) == name


def test_no_two_keys_share_an_environment_name() -> None:
    """Every key can be set from the environment on its own."""
    assert len({env_name(key) for key in KEYS}) == len(KEYS)


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    """Each later source wins over the earlier ones, key by key."""
    path = write(tmp_path, "session_ttl_seconds: 10\ndefault_image: one\ndata_dir: /srv/one\n")
    config = load_config(
        path,
        environ={"SANDKASTEN_DEFAULT_IMAGE": "two", "SANDKASTEN_DATA_DIR": "/srv/two"},
        overrides={"data_dir": "/srv/three", "listen": None},
    )
    assert (config.session_ttl_seconds, config.default_image) == (10, "two")
    assert config.db_path == Path("/srv/three/sandkasten.db")


def test_listen_may_be_a_list_or_commas(tmp_path: Path) -> None:
    """TCP and a unix socket at once, from the file or the environment."""
    path = write(tmp_path, "listen: ['127.0.0.1:0', 'unix:/run/s.sock']")
    expected = ("127.0.0.1:0", "unix:/run/s.sock")
    assert load_config(path, environ={}).listen == expected
    assert load_config(environ={"SANDKASTEN_LISTEN": "127.0.0.1:0, unix:/run/s.sock"}).listen == expected


def test_older_spellings_are_understood(tmp_path: Path) -> None:
    """Files of the older layout keep their meaning."""
    path = write(tmp_path, "limits: {cpu_quota: 0.5, mem_limit_mb: 64, pids_limit: 32, max_exec_timeout_ms: 1000}")
    defaults = load_config(path, environ={}).defaults
    assert (defaults.cpu_limit, defaults.mem_limit_mb, defaults.pids_limit) == (0.5, 64, 32)
    assert set(OLDER_SPELLINGS.values()) <= set(KEYS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sesion_ttl_seconds: 5", "unknown key 'sesion_ttl_seconds'; the nearest known one is 'session_ttl_seconds'"),
        ("mem_limit_mb: 5", "the nearest known one is 'defaults.mem_limit_mb'"),
        ("defaults: {mem_limit: 5}", "the nearest known one is 'defaults.mem_limit_mb'"),
        ("defaults: 3", "unknown key 'defaults'"),
        ("limits: {pids_limit: 9}\ndefaults: {pids_limit: 9}", "defaults.pids_limit is given twice"),
        ("default_image: a\ndefault_image: b", "'default_image' is given twice"),
        (
            "defaults: {network_mode: host}",
            "network_mode: 'host' is not available; there are none, allow, ask, open, bridge",
        ),
        ("network: {mode: bridge}", "refused while isolation.allow_bridge is false"),
        ("isolation: {bridge_range: 10.0.0.0/30}", "bridge_range: a prefix of 8 to 29 bits"),
        ("isolation: {bridge_resolvers: [dns.example]}", "bridge_resolvers: 'dns.example' is no IPv4 address"),
        ("defaults: {network_mode: nonne}", "network_mode must be one of none, allow, ask, open, bridge"),
        (
            "defaults: {network_mode: open}\negress: {max_mode: allow}",
            "max_mode is allow, less than defaults.network_mode",
        ),
        ("egress: {max_mode: host}", "max_mode must be one of none, allow, ask, open, bridge"),
        ("egress: {permit: [10.0.0.1/8]}", "permit: 10.0.0.1/8 has host bits set"),
        (
            "egress: {upstream_proxy: 'http://proxy.example:3128'}",
            "no http://ADDRESS:PORT, and a name is no address",
        ),
        ("egress: {upstream_proxy: 'https://10.0.0.1:3128'}", "upstream_proxy: 'https://10.0.0.1:3128' is no http:"),
        ("egress: {upstream_proxy: 'http://me:word@10.0.0.1:3128'}", "is no http://ADDRESS:PORT"),
        ("egress: {upstream_proxy: 'http://[fe80::1%1]:80/'}", "is no http://ADDRESS:PORT"),
        ("egress: {upstream_proxy: 'http://10.0.0.1'}", "is no http://ADDRESS:PORT"),
        ("egress: {upstream_proxy: 'http://10.0.0.1:80,81'}", "is no http://ADDRESS:PORT"),
        ("egress: {always_deny: ['*']}", "always_deny: rule '*'"),
        ("egress: {groups: {Own: [example.org]}}", "groups: 'Own' is no name of a group"),
        ("egress: {groups: {own: ['@python']}}", "groups: rule '@python': a group is no rule"),
        ("defaults: {stop_grace_ms: 10001}", "defaults.stop_grace_ms must be between 0 and 10000"),
        ("defaults: {exec_mode: stately}", "exec_mode must be one of stateful, stateless"),
        ("workspace: {persist_by_default: true}", "persist_by_default: True is not available"),
        ("defaults: {cpu_limit: .nan}", "cpu_limit must be between"),
        ("defaults: {cpu_limit: 0}", "cpu_limit must be between"),
        ("defaults: {pids_limit: true}", "expected a number, not True"),
        ("defaults: {pids_limit: 1.5}", "expected a number, not 1.5"),
        ("defaults: {pids_limit: many}", "expected a number, not 'many'"),
        ("defaults: {readonly_rootfs: maybe}", "expected true or false"),
        ("security: {seccomp: loose}", "'loose' is none of strict, mvp, debug, off"),
        ("sessions_on_stop: forget", "sessions_on_stop must be one of"),
        ("listen: 8080", "expected a list"),
        ("listen: 'localhost'", "neither HOST:PORT nor unix:/PATH"),
        ("listen: '127.0.0.1:65536'", "neither HOST:PORT"),
        ("listen: '[::zz]:80'", "neither HOST:PORT"),
        ("listen: '[1:2]:80'", "no IPv6 address"),
        ("listen: 'unix:relative.sock'", "absolute path"),
        ("listen: []", "at least one address"),
        (f"listen: 'unix:/{'x' * 120}'", "longer than 107 bytes"),
        ("api_key: 'two words'", "visible ASCII"),
        ("image_aliases: {python: '../x'}", "is not an image name"),
        ("allowed_images: ['-x']", "is not an image name"),
        ("session_ttl_seconds: 86401", "between 1 and 86400"),
        ("[]", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    """Nothing that can't be honoured is accepted, and the sentence says which key and why."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), environ={})
    assert words in str(caught.value)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    """Two mistakes make one error with two lines."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "colour: red\ndefaults: {pids_limit: many}"), environ={})
    assert len(str(caught.value).splitlines()) == 2


def test_misspelt_variables_are_errors_and_foreign_ones_are_not() -> None:
    """A near miss of a known name is a mistake; what container engines set under our prefix is not ours."""
    with pytest.raises(ConfigError, match="the nearest known one is SANDKASTEN_API_KEY"):
        load_config(environ={"SANDKASTEN_APIKEY": "x"})
    foreign = {"SANDKASTEN_SERVICE_HOST": "10.0.0.1", "SANDKASTEN_PORT_8080_TCP": "tcp://10.0.0.1:8080"}
    assert load_config(environ=foreign) == Config()


def test_a_bare_off_in_yaml_is_the_word(tmp_path: Path) -> None:
    """YAML reads `off` as false; for seccomp it is the documented choice."""
    assert load_config(write(tmp_path, "security: {seccomp: off}"), environ={}).security.seccomp == "off"


def test_protections_are_named_or_refused() -> None:
    """A misspelt name, one that nothing can do without, a contradiction: errors. The environment takes commas."""
    environ = {"SANDKASTEN_ISOLATION_REQUIRED": "landlock, seccomp", "SANDKASTEN_ISOLATION_ALLOW_MISSING": "disk"}
    isolation = load_config(environ=environ).isolation
    assert (isolation.required, isolation.allow_missing) == (("landlock", "seccomp"), ("disk",))
    with pytest.raises(ConfigError, match="'landlok' is no protection; there are privilege, "):
        load_config(environ={"SANDKASTEN_ISOLATION_REQUIRED": "landlok"})
    with pytest.raises(ConfigError, match="no sandbox can be made without namespaces"):
        load_config(environ={"SANDKASTEN_ISOLATION_ALLOW_MISSING": "namespaces"})
    with pytest.raises(ConfigError, match="required and allow_missing both name disk"):
        load_config(environ=environ | {"SANDKASTEN_ISOLATION_REQUIRED": "disk"})


def test_values_without_effect_are_announced() -> None:
    """A setting that is accepted and does nothing yet has a sentence that says so."""
    config = load_config(environ={"SANDKASTEN_POOL_IMAGES": "python=3"})
    assert any("pool.images" in each for each in config.notices())
    assert not config.pool.in_force


def test_session_pools_have_a_size_and_perhaps_a_maximum(tmp_path: Path) -> None:
    """A number alone is the size. A pool of nothing is no pool, and a pool that is off promises nothing."""
    environ = {"SANDKASTEN_POOL_ENABLED": "true", "SANDKASTEN_POOL_IMAGES": "python=3,base=0"}
    assert load_config(environ=environ).pool.in_force == {"python": PoolSize(3)}
    file = write(tmp_path, "pool: {enabled: true, images: {python: {size: 2, max: 9}, base: 1}}")
    assert load_config(file, environ={}).pool.in_force == {"python": PoolSize(2, 9), "base": PoolSize(1)}
    file = write(tmp_path, "pool: {enabled: true, images: {python: {size: 2, account: user}}}")
    assert load_config(file, environ={}).pool.in_force == {"python": PoolSize(2, account="user")}
    file = write(tmp_path, "pool: {images: {python: 5000}}")
    assert load_config(file, environ={}).notices()


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ("{python: -1}", "size must be between"),
        ("{python: 10001}", "size must be between"),
        ("{python: 99999999999999999999}", "size must be between"),
        ("{python: 1.5}", "expected a number"),
        ("{python: many}", "expected a number"),
        ("{python: true}", "expected a number"),
        ("{python: {size: 2, max: 1}}", "max is 1, less than size"),
        ("{python: {size: 2, max: -1}}", "max must be between"),
        ("{python: {max: 2}}", "size is missing"),
        ("{python: {size: 2, account: root}}", "account must be"),
        ("{python: {size: 2, most: 3}}", "unknown key 'most'"),
        ("{../etc: 1}", "is not an image name"),
        ("{debian: 1}", "is not in allowed_images"),
        ("{python: 600, base: {size: 1, max: 401}}", "1001 sessions together"),
        ("[python]", "expected a mapping"),
    ],
)
def test_pools_that_can_t_be_are_refused_at_the_start(tmp_path: Path, images: str, problem: str) -> None:
    """Sizes out of range, images that no session may have, and more members than sessions."""
    file = write(tmp_path, f"allowed_images: [python, base]\npool:\n  enabled: true\n  images: {images}\n")
    with pytest.raises(ConfigError, match=problem):
        load_config(file, environ={})


def test_the_key_never_shows_in_a_repr() -> None:
    """Printing or logging a configuration does not tell the key."""
    assert "hunter2" not in repr(Config(api_key="hunter2"))
    assert "***" in repr(Config(api_key="hunter2"))


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """A user who may write the file may choose the key and the data directory."""
    path = write(tmp_path, "")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="other users may write"):
        load_config(path, environ={})


def test_all_mistakes_are_told_one_line_each(tmp_path: Path) -> None:
    """Unknown keys, values of the wrong type and values out of bounds, of one section and of several, together."""
    path = write(tmp_path, "colour: red\nserver: {max_sessions: -1, lisen: x}\ndefaults: {cpu_limit: -1}\n")
    environ = {"SANDKASTEN_PIDS_LIMIT": "1", "SANDKASTEN_SESSION_TTL_SECONDS": "0", "SANDKASTEN_RUNS_KEEP_MB": "much"}
    with pytest.raises(ConfigError) as caught:
        load_config(path, environ=environ)
    lines = str(caught.value).splitlines()
    for name in (
        *("'colour'", "'server.lisen'", "runs.keep_mb", "server.max_sessions must", "defaults.cpu_limit"),
        *("defaults.pids_limit", "session_ttl_seconds"),
    ):
        assert len([line for line in lines if name in line]) == 1, (name, lines)
    assert len(lines) == 7


def test_what_is_left_out_as_wrong_contradicts_nothing(tmp_path: Path) -> None:
    """The pool fits the number of sessions that was meant, though its section has a mistake elsewhere."""
    text = "server: {max_sessions: 5000, pool_sandboxes: -1}\npool: {enabled: true, images: {host: 2000}}\n"
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), environ={})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("server.pool_sandboxes must")


def test_only_files_are_found_and_a_strange_caller_is_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of that name is passed by; an environment that sudo did not write is no error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sandkasten.yaml").mkdir()
    (tmp_path / ".sandkasten").mkdir()
    write(tmp_path / ".sandkasten", "")
    assert find_file(None, {"SUDO_UID": "x"}) == SEARCH_PATH[1]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that was asked for must be there."""
    with pytest.raises(ConfigError, match="no-such"):
        load_config(tmp_path / "no-such.yaml", environ={})


def test_the_search_order_is_argument_environment_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that is given wins."""
    monkeypatch.chdir(tmp_path)
    assert find_file(None, {}) in (None, SEARCH_PATH[2])
    (tmp_path / ".sandkasten").mkdir()
    write(tmp_path / ".sandkasten", "")
    assert find_file(None, {}) == SEARCH_PATH[1]
    write(tmp_path, "")
    assert find_file(None, {}) == SEARCH_PATH[0]
    assert find_file(None, {"SANDKASTEN_CONFIG": "/x"}) == Path("/x")
    assert find_file(Path("/y"), {"SANDKASTEN_CONFIG": "/x"}) == Path("/y")


def test_a_configuration_can_not_be_changed() -> None:
    """Values are frozen all the way down."""
    config = Config()
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.session_ttl_seconds = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.image_aliases["python"] = "evil"  # type: ignore[index]


def test_the_example_file_shows_the_defaults() -> None:
    """An operator who copies the example changes nothing; docs/settings.py writes every key into it."""
    assert load_config(ROOT / "config" / "sandkasten.example.yaml", environ={}) == Config()


_TEXT = st.text("aA0 ,=:/[].-\0\u2028", max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), _VALUES, max_size=4))
def test_any_value_gives_a_configuration_or_a_sentence(overrides: dict[str, object]) -> None:
    """The outcome is a `Config` or a `ConfigError`, whatever a key is set to."""
    try:
        outcome: object = load_config(environ={}, overrides=overrides)
    except ConfigError as error:
        outcome = str(error)
    assert isinstance(outcome, Config) or outcome
