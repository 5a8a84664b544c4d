"""Properties of models: all hold for registered models, and each broken model fails its own."""

import json
import re

import broken_models  # noqa: F401  registers models
import checked_config
import own_model  # noqa: F401  registers a model
import pages
import pytest
import registries
from checked_config import get_config as config
from runs import nothing

from jaxrank import cli, config_files, extensions
from jaxrank.errors import InputError
from jaxrank.export.comparison.parity import MAX_DIFFERENCE
from jaxrank.model_check import check
from jaxrank.models import registry

FUNCTIONS = ("tracing", "shapes", "dtypes", "train", "order")
TRAINED = ("devices", "resume", "export", "onnx", "compile")


def statuses(c, skip):
    result = check.check_model(c, skip=skip, topologies=["v3-8"], report=nothing)
    return {c.name: c.status for c in result.checks}, result


# Fields that make a model small, or that use more of it.
FIELDS = {
    "ranker": dict(mlp_units=(4,), cross_layers=1, norm="batch", dropout=0.1),
    "gdcn": dict(mlp_units=(4,), cross_layers=1),
    "qnn": dict(layers=1, norm="batch", dropout=0.1),
    "deepfm": dict(mlp_units=(4,)),
    "final_mlp": dict(first_mlp_units=(4,), second_mlp_units=(4,), heads=2, first_context=("c0",)),
}

# Models of the layers of others. Training them on eight devices, and again, would prove no more.
OF_SHARED_LAYERS = ("deepfm", "final_mlp", "gdcn")


@pytest.mark.parametrize(
    "model", [name for name in registry.names() if ("model", name) not in extensions.origins()]
)
def test_all_properties_hold_for_each_model_of_the_package(model):
    fields = FIELDS.get(model, {})
    skip = ("devices", "resume", "compile") if model in OF_SHARED_LAYERS else ("compile",)
    results, result = statuses(config(model, **fields), skip)
    expected = [name for name in (*FUNCTIONS, *TRAINED) if name not in skip]
    assert results == dict.fromkeys(expected, "pass"), check.describe(result)


@pytest.fixture
def own_request_losses(tmp_path):
    """The losses of the page, and one that returns a number per request."""
    text = pages.marked("requests.md", "run by check_test.py: OWN_REQUEST_LOSS")
    wrong = text.replace("squared_softmax", "of_the_batch").replace("** 2", "** 2).mean()")
    wrong = wrong.replace("return (odds", "return ((odds")
    with registries.restored():
        for name, code in (("losses", text), ("wrong", wrong)):
            path = tmp_path / f"{name}.py"
            path.write_text(code)
            extensions.load(path)
        yield


def test_losses_of_requests_have_the_properties_of_training(own_request_losses):
    skip = [name for name in check.PROPERTIES if name not in ("devices", "resume")]
    c = config_files.load("ranking")
    c.task_losses.click = "squared_softmax"
    results, result = statuses(c, skip)
    assert results == {"devices": "pass", "resume": "pass"}, check.describe(result)
    c.task_losses.click = "of_the_batch"
    _, result = statuses(c, [*skip, "resume"])
    assert "each must return one number per example, of shape" in result.checks[0].finding


@pytest.mark.parametrize(
    ("model", "failed", "message"),
    [
        ("reads_its_neighbour", "order", "64 examples in another order .* differ"),
        ("reads_the_mean_of_the_batch", "order", "without the other half .* differ"),
        ("drops_units_by_device", "devices", "on 8 devices and on one differ"),
        ("asks_for_float64", "dtypes", "Explicitly requested dtype float64"),
        ("rounds_its_output", "dtypes", "the output is bfloat16"),
        ("branches_on_a_value", "tracing", "broken_models.py:.*TracerBoolConversionError"),
        ("draws_with_numpy", "tracing", "two traces"),
        ("always_drops_units", "train", "broken_models.py:.*InvalidRngError"),
        ("never_drops_units", "train", "draws no random numbers"),
        ("never_updates_statistics", "train", "does not update the state batch_stats"),
        ("has_one_output_too_many", "shapes", r"\[64, 2\]: found \[64, 3\]"),
    ],
)
def test_a_broken_model_fails_its_property(model, failed, message):
    skip = TRAINED[failed == "devices" :]
    results, result = statuses(config(model), skip)
    assert [name for name, status in results.items() if status == "fail"] == [failed]
    assert result.failed == [failed]
    text = check.describe(result)
    (line,) = [line for line in text.splitlines() if line.startswith("FAIL")]
    assert re.search(f"FAIL +{failed} .*{message}", line), line
    assert check.summary(result).endswith(f"1 of {len(results)} properties failed: {failed}.")


def test_a_model_may_give_names_of_others_other_meanings():
    skip = [name for name in (*FUNCTIONS, *TRAINED) if name not in ("train", "export")]
    results, result = statuses(config("gives_names_other_meanings"), skip)
    assert results == {"train": "pass", "export": "pass"}
    assert f"at most {MAX_DIFFERENCE:.0e}" in check.describe(result)


def test_the_verb_prints_one_line_for_each_property(capsys):
    path = f"--config={checked_config.__file__}:reads_its_neighbour"
    arguments = ["check-model", path, f"--skip={','.join(TRAINED)}"]
    with pytest.raises(cli.FailedCheckError, match="properties failed: order"):
        cli.run([*arguments, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["model"] == "reads_its_neighbour"
    assert [c["name"] for c in result["checks"]] == list(FUNCTIONS)
    with pytest.raises(InputError, match="--skip: must be one of .*found 'compil'.*'compile'"):
        cli.run([*arguments[:2], "--skip=compil"])


def test_an_accelerator_without_a_compiler_is_skipped_by_name(monkeypatch):
    def absent(topology):
        raise InputError(f"the compiler for {topology.name} must be installed")

    monkeypatch.setattr("jaxrank.aot.devices.devices", absent)
    results, result = statuses(config("own"), (*FUNCTIONS, *TRAINED[:-1]))
    assert results == {"compile v3-8": "not applicable"}
    assert "skip  compile v3-8  the compiler for v3-8" in check.describe(result)
