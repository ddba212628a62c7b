"""Tests of the configuration: sources, validation, error messages, overrides."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from infinity.config.renamed import migrate_stored_keys
from infinity.config.schema import Config, load_config
from infinity.config.source import apply_overrides
from infinity.errors import ConfigError, InfinityWarning
from infinity.optim.rules import RULES

RULE_NAMES = " or ".join(", ".join(map(repr, RULES)).rsplit(", ", 1))
FULL = {
    "nvme_path": ["/mnt/a", "/mnt/b"],
    "precision": "fp32",
    "optimizer": {"type": "adam", "lr": 1e-4, "betas": [0.9, 0.95]},
    "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}},
    "placement": {"weights": "disk", "optimizer_state": "disk", "gradients": "host"},
    "budget": {"host": "24GiB", "disk": "1 TB"},
    "io": {"block_size": "2MiB", "queue_depth": 16},
    "chunk_size": 1 << 20,
}


def refusal(source: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return str(caught.value)


def write_file(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_config_defaults() -> None:
    config = load_config({})
    assert config.nvme_path == ()
    assert config.precision == "bf16"
    assert config.optimizer.type == "AdamW"
    assert config.optimizer.weight_decay == 0.01
    assert config.gradient_clipping == 1.0
    assert config.gradient_accumulation_steps == 1
    assert (
        config.placement.weights
        == config.placement.optimizer_state
        == config.placement.gradients
        == "auto"
    )
    assert config.budget.host is None
    assert (config.io.block_size, config.io.queue_depth) == (2**20, 8)
    assert config.chunk_size == "auto"
    assert config.prefetch_units == 2


def test_dict_yaml_json_and_config_load_equally(tmp_path: Path) -> None:
    import yaml

    expected = load_config(FULL)
    assert expected.nvme_path == (Path("/mnt/a"), Path("/mnt/b"))
    assert expected.budget.host == 24 * 2**30
    assert expected.optimizer.type == "Adam"
    assert expected.optimizer.weight_decay == 0.0
    as_yaml = write_file(tmp_path / "a.yaml", yaml.safe_dump(FULL))
    as_json = write_file(tmp_path / "a.json", json.dumps(FULL))
    for source in (as_yaml, str(as_json), expected):
        loaded = load_config(source)
        assert loaded == expected
        assert loaded.resolved() == expected.resolved()


@pytest.mark.parametrize("given", ["/mnt/a", Path("/mnt/a"), ["/mnt/a"], ("/mnt/a",)])
def test_nvme_path_accepts_one_or_several(given: Any) -> None:
    assert load_config({"nvme_path": given}).nvme_path == (Path("/mnt/a"),)


@pytest.mark.parametrize("given", ["", 3, [], ["/a", "/a"], [""], {"a": 1}])
def test_invalid_nvme_path_rejected(given: Any) -> None:
    assert "nvme_path:" in refusal({"nvme_path": given})


def test_all_mistakes_reported_at_once() -> None:
    text = refusal(
        {
            "nvm_path": "/x",
            "placement": {"weigths": "host", "optimizer_state": "dsik", "gradients": "disk"},
            "io": {"queue_depth": 0, "num_threads": "4", "block_size": 5000},
            "optimizer": {"type": "adamm", "lr": -1, "betas": [0.9, 1.0], "eps": "abc"},
            "budget": {"host": "24 XB", "device": True},
            "gradient_clipping": float("nan"),
            "gradient_accumulation_steps": 1.5,
            "prefetch_units": -1,
            "chunk_size": 1000,
            "cpu": None,
        }
    )
    for part in (
        "nvm_path: unknown key; did you mean 'nvme_path'? valid here: nvme_path, precision,",
        "placement.weigths: unknown key; did you mean 'placement.weights'? valid here: weights",
        "placement.optimizer_state: should be 'auto', 'device', 'host' or 'disk', got 'dsik';",
        "io.queue_depth: should be greater than or equal to 1, got 0",
        "io.num_threads: should be a valid integer, got '4'",
        "io.block_size: should be a multiple of 4096, got 5000",
        f"optimizer.type: should be {RULE_NAMES}, got 'adamm'",
        "optimizer.lr: should be greater",
        "optimizer.betas.1: should be less than 1, got 1.0",
        "optimizer.eps: should be a number, got 'abc'",
        "budget.host: '24 XB' is not a size",
        "budget.device: True is not a size",
        "gradient_clipping: should be",
        "gradient_accumulation_steps: should be",
        "prefetch_units: should be",
        "chunk_size: should be",
        "cpu: is a section of keys and values, got None",
    ):
        assert part in text
    assert text.startswith("17 mistakes in the configuration:")
    assert "weight_decay" not in text  # its default fails only because `type` did


def test_misplaced_key_suggests_section() -> None:
    assert "lr: unknown key; did you mean 'optimizer.lr'?" in refusal({"lr": 1e-3})


def test_deepspeed_configuration_recognized() -> None:
    text = refusal({"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}, "typo": 1})
    assert "zero_optimization, fp16 are from a DeepSpeed configuration" in text
    assert 'with our keys in its section "infinity"' in text
    assert "typo: unknown key" in text
    assert "fp16: unknown key" not in text


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ({"precision": "half"}, "precision: "),
        ({"durable": True}, "durable: true: nvme_path must be given, state is kept there"),
        ({"resume": "auto"}, "resume: auto needs durable: true"),
        ({"commit_every": 0}, "commit_every"),
        ({"placement": {"weights": "disk"}}, "placement: weights on disk: nvme_path must be given"),
        ({"scheduler": {"type": "CosineAnealingLR"}}, "did you mean 'CosineAnnealingLR'?"),
        ({"scheduler": {"type": "LRScheduler"}}, "scheduler.type: is not in torch"),
        ({"scheduler": {}}, "scheduler.type: must be given"),
        (
            {"scheduler": {"type": "StepLR", "params": {"step": 3}}},
            "scheduler.params: StepLR does not take step and needs step_size; did you mean 'step_",
        ),
        ({"seed": True}, "seed: should be a valid integer, got True"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: should be a finite number"),
        ({"io": {"queue_depth": 257}}, "io.queue_depth: should be less than or equal to 256"),
        ({"io": {"block_size": 0}}, "io.block_size: should be greater than 0"),
        ({"chunk_size": True}, "chunk_size: should be"),
        ({"step_log": 3}, "step_log: should be a path, got 3"),
        ({"update": "gpu"}, "got 'gpu'; did you mean 'device'?"),
        ({"placement": {"weights": "gpu"}}, "got 'gpu'; did you mean 'device'?"),
        ({"placement": {"weights": "cpu"}}, "got 'cpu'; did you mean 'host'?"),
        ({"placement": "dsik"}, "placement: should be one of auto, device, host, disk, or a sect"),
        ({"activations": {"checkpoint": "blocks"}}, "'none' or 'units' or a valid integer, got"),
        ({"io": {"verify": "x"}}, "io.verify: should be a valid boolean or 'auto', got 'x'"),
        ({"resume": "yes"}, """should be "auto", "never", or the directory of a run, got 'yes'"""),
        ({"resume": True}, 'should be "auto", "never", or the directory of a run, got True'),
        ({"trace_steps": -1}, "counted from 1, got -1"),
        ({"hints": {"live_parameters": 1.5}}, "hints.live_parameters: "),
        ({1: 2}, "1"),
    ],
)
def test_single_mistake_message(source: Any, part: str) -> None:
    text = refusal(source)
    assert part in text
    assert text.startswith("1 mistake in the configuration:")


def test_source_of_other_type_rejected() -> None:
    assert "not a configuration: 3" in refusal(3)


def test_numbers_given_as_text_are_converted(tmp_path: Path) -> None:
    text = """
optimizer: {lr: 1e-4, eps: 1E-9}
budget: {host: 2e9}
scheduler: {type: CosineAnnealingLR, params: {T_max: 10, eta_min: 1e-5}}
"""
    config = load_config(write_file(tmp_path / "a.yml", text))
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.eps == 1e-9
    assert config.budget.host == 2 * 10**9
    assert config.scheduler is not None
    assert config.scheduler.params == {"T_max": 10, "eta_min": 1e-5}
    from_text = load_config({"optimizer": {"lr": "1e-4"}}).optimizer.lr
    assert from_text == 1e-4
    params = {"type": "CosineAnnealingLR", "params": {"T_max": 10, "eta_min": "1e-5"}}
    from_dict = load_config({"scheduler": params}).scheduler
    assert from_dict is not None
    assert from_dict.params["eta_min"] == 1e-5


# Billion laughs: each line expands to ten times the values of the previous one.
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20)
)


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.json", '{"io": {"queue_depth": 1, "queue_depth": 2}}', "twice in one object: 'queue_d"),
        ("a.yaml", "seed: 1\nio:\n  queue_depth: 1\n  queue_depth: 2\n", "'queue_depth' is given"),
        ("a.yaml", "seed: 1\nseed: 1\n", "'seed' is given twice (line 2, column 1)"),
        ("a.yaml", "seed: [1\n", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", "[1]", "a list instead of keys"),
        ("a.yaml", "just text", "the single value 'just text'"),
        ("a.yaml", "1: 2", "the key 1 is not text"),
        ("a.yaml", "io: {off: 2}", "the key False is not text"),
        ("a.yaml", "? [a, b]\n: 2", "not valid YAML"),
        ("a.yaml", "a: !!python/object:os.system {}", "not valid YAML"),
        ("a.yaml", "seed: " + "[" * 9000, "nested deeper than 100 levels (line 1, column 106)"),
        ("a.yaml", "".join(" " * i + "a:\n" for i in range(500)), "nested deeper than 100 levels"),
        ("a.json", '{"a": ' * 500 + "1" + "}" * 500, "nested deeper than 100 levels"),
        ("a.json", '{"a": ' + "[" * 99999, "not valid JSON"),
        ("a.yaml", LAUGHS, "more than 100,000 values"),
        ("a.yaml", "a: &a {b: [*a]}", "*a refers to itself"),
        ("a.yaml", "a: !!int ''", "a value does not fit its !!tag"),
        ("a.yaml", "a: !!bool maybe", "a value does not fit its !!tag: 'maybe'"),
        ("a.yaml", "a: !!timestamp now", "a value does not fit its !!tag"),
        ("a.toml", "seed = 1", "use a .yaml, .yml or .json file"),
        ("config", "seed: 1", "the name has no ending"),
    ],
)
def test_invalid_file_rejected(tmp_path: Path, name: str, text: str, part: str) -> None:
    path = write_file(tmp_path / name, text)
    message = refusal(path)
    assert part in message
    assert str(path) in message


def test_nvme_path_with_link_to_same_directory_rejected(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to("drive")
    given = [str(tmp_path / "drive"), str(tmp_path / "link")]
    assert f"same path twice: {given[0]} and {given[1]} are one" in refusal({"nvme_path": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [("/mnt/\udcff", "should be UTF-8"), (f"/mnt/{'ä' * 128}/b", "a name of 256 bytes, more than")],
)
def test_unencodable_or_too_long_path_rejected(given: str, message: str) -> None:
    assert message in refusal({"nvme_path": given})
    assert message in refusal({"step_log": given})


def test_unreadable_file_rejected(tmp_path: Path) -> None:
    assert "none.yaml does not exist" in refusal(tmp_path / "none.yaml")
    assert "cannot be read" in refusal(tmp_path / "none\0.yaml")
    (tmp_path / "d.yaml").mkdir()
    assert "cannot be read" in refusal(tmp_path / "d.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    assert "cannot be read" in refusal(tmp_path / "latin.yaml")
    assert "File name too long" in refusal(tmp_path / f"{'x' * 4096}.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "zero.json"):
        assert "it is a pipe or a device, not a file" in refusal(tmp_path / name)
    assert "larger than 1 MiB" in refusal(
        write_file(tmp_path / "large.yaml", "#" * (1 << 20) + "\n")
    )
    assert "nvme_path: there is no such user" in refusal({"nvme_path": "~no-such-user/a"})
    assert "nested deeper than 100 levels" in refusal({}, "a." * 5000 + "a=1")
    assert "a value does not fit its !!tag" in refusal({}, "seed=!!int ''")


def test_yaml_merge_keys_and_empty_file_accepted(tmp_path: Path) -> None:
    text = "placement: &h {weights: host}\nio: {queue_depth: 4}\n"
    config = load_config(write_file(tmp_path / "a.yaml", text))
    assert config.placement.weights == "host"
    assert load_config(write_file(tmp_path / "b.yaml", "# nothing\n")) == load_config({})
    merged = "placement: &h {weights: host}\nbudget: {<<: {host: 1GiB}, host: 2GiB}\n"
    assert load_config(write_file(tmp_path / "c.yaml", merged)).budget.host == 2**31


def test_overrides_take_precedence_and_keep_source() -> None:
    raw = {"io": {"queue_depth": 4}, "cpu": None}
    merged = apply_overrides(
        raw,
        [
            "io.queue_depth=16",
            "placement.weights=host",
            "cpu.isa=avx2",
            "optimizer.lr=1e-4",
            "step_log=",
        ],
    )
    assert raw == {"io": {"queue_depth": 4}, "cpu": None}
    assert merged["io"] == {"queue_depth": 16}
    assert merged["cpu"] == {"isa": "avx2"}
    config = load_config(raw, ["cpu.isa=avx2", "optimizer.betas=[0.8, 0.9]", "budget.host=1GiB"])
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.budget.host == 2**30
    assert load_config(config, ["seed=3"]).seed == 3
    assert load_config(config, ["seed=3"]).budget.host == 2**30


def test_invalid_overrides_all_reported() -> None:
    text = refusal(
        {"seed": 1}, "io.queue_depth", "=3", "a..b=1", "io=[", "seed.x=1", "prefetch_units=0"
    )
    for part in ("'io.queue_depth':", "'=3':", "'a..b=1':", "'io=['", "'seed.x=1': seed holds 1"):
        assert part in text
    assert "prefetch_units" not in text
    assert "io.queue_deep: unknown key" in refusal({}, "io.queue_deep=1")


def test_resolved_reports_origin_of_every_value() -> None:
    dump = load_config(FULL).resolved()
    assert json.loads(json.dumps(dump)) == dump
    assert dump["io.queue_depth"] == {"value": 16, "origin": "given"}
    assert dump["io.num_threads"] == {"value": 4, "origin": "default"}
    assert dump["optimizer.weight_decay"] == {"value": 0.0, "origin": "default"}
    assert dump["nvme_path"] == {"value": ["/mnt/a", "/mnt/b"], "origin": "given"}
    assert dump["budget.host"] == {"value": 24 * 2**30, "origin": "given"}
    assert dump["scheduler.params"]["value"] == {"T_max": 10}
    assert load_config({}).resolved()["scheduler"] == {"value": None, "origin": "default"}


def test_config_is_immutable() -> None:
    config = load_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    assert isinstance(config, Config)


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        ("adamw", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
        ("ADAM", {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        ("lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        ("sgd", {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0,
                 "nesterov": False}),
        ("Adagrad", {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10,
                     "initial_accumulator_value": 0.0}),
    ],
)  # fmt: skip
def test_optimizer_keys_and_defaults_per_rule(kind: str, defaults: dict[str, Any]) -> None:
    config = load_config({"optimizer": {"type": kind}})
    assert config.optimizer.parameters() == {**defaults, "maximize": False}
    assert config.optimizer.moments == "fp32"
    keys = {key.removeprefix("optimizer.") for key in config.resolved() if "optimizer." in key}
    assert keys == {"type", "moments", "maximize", *defaults}
    assert load_config(config).resolved() == config.resolved()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"type": "SGD", "betas": [0.9, 0.99]}, "optimizer.betas: SGD does not take it; it"),
        ({"momentum": 0.9}, "optimizer.momentum: AdamW does not take it; it takes lr, betas, eps"),
        ({"type": "Lion", "eps": 1e-8}, "optimizer.eps: Lion does not take it"),
        ({"type": "SGD", "nesterov": True}, "optimizer.nesterov: needs momentum above 0"),
        ({"type": "SGD", "momentum": 0.9, "dampening": 0.1, "nesterov": True}, "no dampening"),
        ({"type": "Adagrad", "initial_accumulator_value": -1}, "greater than or equal to 0"),
        ({"moments": "int8"}, "optimizer.moments: should be 'fp32', 'bf16'"),
        ({"type": "Adafactor"}, f"should be {RULE_NAMES}"),
    ],
    ids=str,
)  # fmt: skip
def test_optimizer_keys_of_other_rules_rejected(optimizer: dict[str, Any], message: str) -> None:
    assert message in refusal({"optimizer": optimizer})


def test_hints_accept_integral_floats() -> None:
    hints = load_config({"hints": {"live_parameters": 1e9, "max_params_in_cpu": "2e6"}}).hints
    assert (hints.live_parameters, hints.max_params_in_cpu) == (10**9, 2 * 10**6)
    assert type(hints.live_parameters) is int


def test_text_source_error_mentions_path() -> None:
    text = refusal("train_batch_size: 4\n" * 500)
    assert len(text) < 300
    assert "train_batch_size: 4...: not a configuration file" in text
    assert "taken for the path of a file, and the name has no ending" in text


def test_json_schema_describes_fields() -> None:
    """The JSON Schema has defaults, limits and descriptions of the fields."""
    schema = Config.model_json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["properties"]["prefetch_units"] == {
        "default": 2, "description": "Units fetched before they are needed.", "minimum": 0,
        "title": "Prefetch Units", "type": "integer",
    }  # fmt: skip
    assert {"type": "integer"} in schema["properties"]["trace_steps"]["anyOf"]
    assert {"type": "string"} in schema["$defs"]["BudgetConfig"]["properties"]["host"]["anyOf"]
    assert set(schema["properties"]) == set(Config.model_fields)
    assert not schema["additionalProperties"]


def test_renamed_keys_accepted_with_warning() -> None:
    """Applies to mappings and overrides; giving both names of a key is rejected."""
    earlier = {
        "nvme_path": "/nvme",
        "durable": True,
        "durable_every": 3,
        "journal": "/log",
        "frozen": {"rest": "nf4"},
        "io": {"stuck_after_s": 7},
        "hints": {"weights_in_ram": 1000},
        "activations": {"logits": "sliced"},
    }
    overrides = ["placement.moments=host", "placement.whole=true", "activations.logits=whole"]
    with pytest.warns(InfinityWarning) as caught:
        config = load_config(earlier, overrides)
    warned = [str(warning.message).partition(" is an earlier name")[0] for warning in caught]
    assert warned == [
        "activations.logits: \"sliced\"", "durable_every", "frozen.rest", "hints.weights_in_ram",
        "io.stuck_after_s", "journal", "placement.moments", "placement.whole: true",
        "activations.logits: \"whole\"",
    ]  # fmt: skip
    today = {
        "nvme_path": "/nvme",
        "durable": True,
        "commit_every": 3,
        "step_log": "/log",
        "frozen": {"format": "nf4"},
        "io": {"timeout_s": 7},
        "hints": {"max_params_in_cpu": 1000},
        "placement": {"optimizer_state": "host", "reshard_after_forward": False},
        "activations": {"logits": "full"},
    }
    assert config == load_config(today)
    conflict = refusal({"journal": "/a", "step_log": "/b"})
    assert "journal and step_log are given" in conflict
    stored = {"engine.frozen.rest": "nf4", "engine.activations.logits": "sliced", "lr": 1}
    assert migrate_stored_keys(stored, "engine.") == {
        "engine.frozen.format": "nf4", "engine.activations.logits": "chunked", "lr": 1,
    }  # fmt: skip
