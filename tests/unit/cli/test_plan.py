"""`raymoe plan`: what it prints is what was planned, and what does not fit is refused."""

import json
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymoe.cli import run
from raymoe.cli.plan import _policy_rows, gantt
from raymoe.data.sizing import map_batches_kwargs
from raymoe.engine import node as engine_node
from raymoe.plan.plan import RESOURCE_NAMES
from raymoe.plan.policy import Policy
from raymoe.plan.rank import notes_of
from raymoe.plan.search import find_plan
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.schedule.timeline import Span, Timeline
from raymoe.specs.hardware import HARDWARE_PRESETS, HardwareSpec, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import model_preset
from raymoe.specs.quantization import quantization_of
from raymoe.specs.workload import Workload
from raymoe.units import GIB, format_bytes, format_money, format_seconds

# Four layers of the size of Mixtral's: 11 GB, of which a small device holds about half.
CONFIG = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
}
MEMORY = ("--host-memory", "30GiB", "--device-memory", "9GiB")
JOB = ("--prompt-len", "64", "--gen-len", "8", "--num-rows", "64")
NODE = replace(hardware_preset("t4"), host_memory_bytes=30 * GIB, gpu_memory_bytes=9 * GIB)
WORKLOAD = Workload(num_rows=64, prompt_tokens=64, generated_tokens=8)
HOST = HardwareSpec(
    name="no gpu",
    num_cores=8,
    host_memory_bytes=64 * GIB,
    host_bytes_per_s=100e9,
    host_flop_per_s=1e12,
)
BLOCKED = (
    *("torch", "ray", "numpy", "transformers", "numba", "pyarrow", "safetensors", "tokenizers"),
    *("huggingface_hub", "jinja2", "llguidance", "triton", "fsspec", "packaging"),
)
MODELS = (
    "mixtral-8x7b",
    "mixtral-8x22b",
    "dbrx",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3-235b-a22b",
    "gpt-oss-120b",
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    directory = tmp_path / "few-layers"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return str(directory)


def words(text: str) -> str:
    """Text of tables and messages without frames and line ends."""
    return " ".join(re.sub(r"[│┃╭╮╰╯─━┏┓┗┛┡┩╇┳├┤┼└┘┌┐┴]", " ", text).split())


def test_it_prints_what_was_planned(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = find_plan(ModelSpec.from_directory(model), NODE, WORKLOAD)
    arguments = ["plan", "--model", model, "--hardware", "T4", *MEMORY, *JOB]
    assert run([*arguments, "--price-per-hour", "1.8", "--currency", "EUR"]) == 0
    found = words(capsys.readouterr().out)
    policy, device = plan.policy, plan.policy.device
    assert plan.device_footprint is not None
    assert device is not None
    for wanted in (
        "few-layers on t4: 64 rows of 64 + 8 tokens",
        f"schedule {plan.schedule}",
        f"batch {policy.max_num_seqs} sequences",
        f"KV cache {policy.num_kv_blocks:,} blocks",
        f"micro-batches of a step {device.num_micro_batches}",
        f"decode attention {100 * device.cpu_attention_fraction:.0f} % on the CPU",
        f"decoding is bound by {RESOURCE_NAMES[plan.bound]}",
        f"prefill {plan.prefill_tokens_per_s:,.1f} prompt tokens/s",
        f"decode {plan.decode_tokens_per_s:,.1f} tokens/s",
        f"end to end {plan.tokens_per_s:,.1f} generated tokens/s",
        f"time to generate {format_seconds(plan.job.seconds)}",
        f"cost {format_money(1.8 / 3600 * plan.job.seconds, 'EUR')} in all, "
        f"{format_money(1.8 / 3600 / plan.tokens_per_s * 1e6, 'EUR')} per million generated tokens",
        "2 of the 4 layers of a decode step",
        "available 30.00 GiB",
        "available 9.00 GiB",
    ):
        assert wanted in found
    for footprint in (plan.footprint, plan.device_footprint):
        for purpose, num_bytes in (*footprint.parts, ("total", footprint.total)):
            assert f"{purpose} {format_bytes(num_bytes)}" in found


def test_presets_are_marked_with_what_was_measured_on_such_gpus(tmp_path: Path) -> None:
    model = ModelSpec.from_config(CONFIG)
    plan = find_plan(model, NODE, WORKLOAD, schedule="cgopipe")
    found = " ".join(notes_of(plan, model))
    low, high = 0.34 * plan.tokens_per_s, 0.55 * plan.tokens_per_s
    assert f"measured 0.34 to 0.55 of such a prediction, here {low:,.1f} to {high:,.1f}" in found
    assert "t4 has no products of bfloat16: raymoe computes in float16" in found
    assert "bfloat16" not in " ".join(notes_of(plan, replace(model, dtype="float32")))
    other = " ".join(notes_of(replace(plan, hardware=hardware_preset("a10")), model))
    assert "no measurement has confirmed" in other
    assert "bfloat16" not in other
    assert "overflow in float16" in " ".join(notes_of(plan, model_preset("gpt-oss-20b")))
    NODE.to_file(tmp_path / "node.json")
    read = HardwareSpec.from_file(tmp_path / "node.json")
    assert (read.measured_share, read.has_bfloat16) == ((0.34, 0.55), False)


def test_a_job_out_of_reach_gets_a_sentence(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ("--num-rows", str(10**16), "--schedule", "resident")
    assert run(["plan", "--model", model, "--hardware", "a100", *JOB, *rows]) == 0
    found = words(capsys.readouterr().out)
    assert "time to generate more than 1,000 years" in found
    assert "This job is out of reach" in found


def test_the_dtype_reaches_weights_and_cache(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", model, "--hardware", "a100", *JOB, "--schedule", "resident")
    wide, narrow = (planned(capsys, *given, "--dtype", name) for name in ("float32", "bfloat16"))
    weights = [each["device_memory"]["weights"] for each in (wide, narrow)]
    assert weights[0] == 2 * weights[1]
    assert narrow == planned(capsys, *given)
    assert narrow["fits_gpu"]
    assert "do not offload" in " ".join(narrow["notes"])


def test_the_type_of_states_reaches_the_plan(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("--prompt-len", "64", "--gen-len", "256", "--num-rows", "1000")
    given = ("--model", "qwen3.5-35b-a3b", "--hardware", "l40s", *job, "--schedule", "in_place")
    spec = model_preset("qwen3.5-35b-a3b").with_state_dtype("bfloat16")
    node, wide = hardware_preset("l40s"), planned(capsys, *given)
    narrow = planned(capsys, *given, "--state-dtype", "bfloat16")
    workload = Workload(num_rows=1000, prompt_tokens=64, generated_tokens=256)
    plan = find_plan(spec, node, workload, schedule="in_place")
    assert narrow["tokens_per_s"] == pytest.approx(plan.tokens_per_s)
    assert narrow["tokens_per_s"] > 1.1 * wide["tokens_per_s"]
    for arguments, message in (
        (("--model", "qwen3.5-35b-a3b", "--state-dtype", "float16"), "--state-dtype 'float16'"),
        (("--model", model, "--state-dtype", "bfloat16"), "has no linear attention"),
    ):
        assert run(["plan", *arguments, "--hardware", "l40s"]) == 2
        assert message in words(capsys.readouterr().err)


def test_nodes_share_the_job(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = (
        *JOB, "--num-rows", "4000", "--nodes", "4", "--price-per-hour", "2",
        "--schedule", "resident",
    )  # fmt: skip
    plan = find_plan(
        ModelSpec.from_directory(model), hardware_preset("a100"), replace(WORKLOAD, num_rows=1000),
        schedule="resident",
    )  # fmt: skip
    found = planned(capsys, "--model", model, "--hardware", "a100", *job)
    assert (found["num_nodes"], found["seconds"]) == (4, pytest.approx(plan.job.seconds))
    assert found["cost"] == pytest.approx(4 * 2 * plan.job.seconds / 3600)
    assert run(["plan", "--model", model, "--hardware", "a100", *job]) == 0
    text = words(capsys.readouterr().out)
    assert f"4 such nodes {4 * plan.tokens_per_s:,.1f} generated tokens/s, 1,000 rows each" in text


def test_it_prints_the_plan_of_one_of_several_gpus(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = find_plan(ModelSpec.from_directory(model), NODE, WORKLOAD, tensor_parallel_size=2)
    arguments = ["plan", "--model", model, "--hardware", "t4", *MEMORY, *JOB]
    assert run([*arguments, "--tensor-parallel", "2", "--what-if"]) == 0
    found = words(capsys.readouterr().out)
    for wanted in (
        "few-layers on 1/2 of t4: 64 rows of 64 + 8 tokens",
        "tensor parallel 2 GPUs share each step",
        f"batch {plan.policy.max_num_seqs} sequences",
        f"end to end {plan.tokens_per_s:,.1f} generated tokens/s",
        "available 15.00 GiB",
        "available 9.00 GiB",
        "cores 12 with 50 GB/s 24 with 100 GB/s",
    ):
        assert wanted in found


def test_what_if_is_no_wider_than_a_terminal_and_more_of_what_binds_gains_most(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--model", model, "--hardware", "t4", *MEMORY, *JOB, "--what-if"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lanes = re.findall(r"^ +(gpu|cpu|htod|dtoh) +\|.{60}\| +\d+%$", out, re.MULTILINE)
    assert set(lanes) == {"gpu", "cpu", "htod", "dtoh"}
    table = words(out)
    gains = {
        resource: int(gain)
        for resource, gain in re.findall(
            r"(GPU memory|host memory|link|cores|GPU rate) [^%]*?([+-]\d+) %",
            table[table.index("what if") :],
        )
    }
    assert set(gains) == {"GPU memory", "host memory", "link", "cores", "GPU rate"}
    assert gains["link"] > 20, "weights stream, and the device holds less than half of them"
    assert gains["GPU memory"] > 30, "with 17 GiB all of them stay"
    assert abs(gains["host memory"]) <= 1, "all rows have room already"


def test_a_model_that_does_not_fit_is_refused_with_the_bytes_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["plan", "--model", "deepseek-v3", "--hardware", "l4"]) == 1
    error = capsys.readouterr().err
    assert "deepseek-v3 with one sequence needs" in error
    assert re.search(r"\([\d.]+ GiB short\)", error)
    assert re.search(r"^ +KV cache +[\d.]+ GiB$", error, re.MULTILINE)
    assert re.search(r"^\d+ x l4 hold the model in a pipeline", error, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "mixtral", "--hardware", "l4"], "did you mean 'mixtral-8x7b'"),
        (
            ["--model", "./nowhere", "--hardware", "l4"],
            "./nowhere is neither a directory nor a known",
        ),
        (["--model", "dbrx", "--hardware", "a500"], "did you mean 'a5000'"),
        (["--model", "dbrx", "--hardware", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--model", "dbrx", "--hardware", "t4", "--schedule", "cgopip"], "'cgopipe'"),
        (["--model", "dbrx", "--hardware", "t4", "--host-memory", "9 l"], "is not a size"),
        (
            ["--model", "dbrx", "--hardware", "t4", "--prompt-len", "40000"],
            "32,768 is the largest context",
        ),
        (
            ["--model", "dbrx", "--hardware", "t4", "--prompt-len", "200", "--max-context", "300"],
            "a row has 200 + 128 tokens, and 300 is the largest",
        ),
    ],
)
def test_bad_usage_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments]) == 2
    assert message in words(capsys.readouterr().err)


def test_a_node_without_a_gpu_comes_from_its_file(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.json"
    HOST.to_file(file)
    arguments = ["plan", "--model", model, "--hardware", str(file), *JOB]
    out = tmp_path / "out"
    assert run([*arguments, "--what-if", "--plot", "--out", str(out)]) == 0
    found = words(capsys.readouterr().out)
    plan = find_plan(ModelSpec.from_directory(model), HOST, WORKLOAD)
    assert "schedule in_place" in found
    assert f"end to end {plan.tokens_per_s:,.1f} generated tokens/s" in found
    assert "cores 8 with 100 GB/s 16 with 200 GB/s" in found
    assert "GPU" not in found
    assert [path.name for path in out.iterdir()] == ["throughput.svg"]
    assert run([*arguments, "--device-memory", "9GiB"]) == 2
    assert "no gpu has no GPU; leave it out" in capsys.readouterr().err
    assert run([*arguments, "--schedule", "cgopipe"]) == 2
    assert "no gpu has no GPU; leave it out" in capsys.readouterr().err


def test_a_cache_of_int8_is_planned_for_cores(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.json"
    HOST.to_file(file)
    given = ("--model", model, *JOB)
    plans = [
        planned(capsys, *given, "--hardware", str(file), "--kv-dtype", name)
        for name in ("bfloat16", "int8")
    ]
    blocks = [each["host_memory"]["KV cache"] / each["policy"]["num_kv_blocks"] for each in plans]
    assert 0.5 < blocks[1] / blocks[0] < 0.8  # heads of this model are small beside their factors
    for where, message in (
        (
            ("--hardware", "g6.8xlarge"),
            "is read by the cores alone, and g6.8xlarge (1 x l4) has a GPU",
        ),
        ((), "needs a node without a GPU: name it with --hardware"),
    ):
        assert run(["plan", *given, *where, "--kv-dtype", "int8"]) == 2
        assert message in words(capsys.readouterr().err)


@pytest.mark.slow
def test_pictures_are_drawn(model: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "pictures"
    arguments = ["plan", "--model", model, "--hardware", "t4", *MEMORY, *JOB]
    assert run([*arguments, "--plot", "--out", str(out)]) == 0
    titles = {}
    for path in out.iterdir():
        root = ET.parse(path).getroot()
        titles[path.name] = "".join(root.itertext())
    assert set(titles) == {"roofline.svg", "throughput.svg"}
    assert "FFN of 64 tokens" in titles["roofline.svg"]
    assert "CGOPipe, policy of MoE-Lightning" in titles["throughput.svg"]


def test_the_gantt_shows_the_layers_in_the_middle() -> None:
    """Six layers of 1, 2, ... seconds: the third and the fourth are shown."""
    spans, now = [], 0.0
    for layer in range(6):
        for op, start, seconds in ((Op.PRE, 0.0, 0.5), (Op.EXPERTS, 0.5, 0.5 + layer)):
            task = Task(op=op, layer=layer, part=0, resource=Resource.GPU)
            spans.append(Span(task, now + start, now + start + seconds))
        now += 1.0 + layer
    text = gantt(Timeline("all", tuple(spans)), 80)
    assert "2 of the 6 layers of a decode step, which takes 21.0 s" in text
    lane = re.search(r"\|(.*)\|", text)
    assert lane is not None
    assert re.fullmatch(r"A+X+A+X+", lane[1])
    assert [len(run) / 60 for run in re.findall(r"A+X+", lane[1])] == pytest.approx(
        [3 / 7, 4 / 7], abs=0.02
    )


def plan_without_libraries(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`raymoe plan` where these packages are not installed: not even their sources are found."""
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        f"hidden = {BLOCKED}\n"
        "def find_others(name, *rest):\n"
        "    return None if name.split('.')[0] in hidden else find(name, *rest)\n"
        "PathFinder.find_spec = find_others\n"
        "from raymoe.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "plan", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def check_outcome(done: subprocess.CompletedProcess[str]) -> None:
    """A plan, or a refusal in numbers."""
    if done.returncode == 0:
        assert "generated tokens/s" in done.stdout
        return
    assert done.returncode == 1, done.stderr
    assert re.search(r"needs [\d.]+ [GT]iB of \w+ memory.*\([\d.]+ [MGT]iB short\)", done.stderr)


def test_planning_needs_no_library_that_computes() -> None:
    done = plan_without_libraries(
        "--model", "mixtral-8x7b", "--hardware", "l4", *JOB, "--schedule", "in_place"
    )
    assert done.returncode == 0, done.stderr
    check_outcome(done)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", HARDWARE_PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_on_every_node_is_planned_or_refused(name: str, hardware: str) -> None:
    check_outcome(plan_without_libraries("--model", name, "--hardware", hardware))


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_plan_as_json_is_the_one_that_is_printed(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = find_plan(ModelSpec.from_directory(model), NODE, WORKLOAD)
    given = ("--model", model, "--hardware", "t4", *MEMORY, *JOB, "--price-per-hour", "2")
    found = planned(capsys, *given)
    assert found["tokens_per_s"] == plan.tokens_per_s
    assert found["policy"]["num_kv_blocks"] == plan.policy.num_kv_blocks
    assert sum(found["host_memory"].values()) == plan.footprint.total
    assert found["cost"] == pytest.approx(2 * plan.job.seconds / 3600)


def test_weights_and_cache_in_fewer_bits_take_less(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--model", model, "--hardware", "g6.8xlarge", *JOB)
    spec = ModelSpec.from_directory(model)
    sizes = [
        replace(spec, quantization=quantization_of(name)).weight_bytes(2)
        for name in ("bf16", "fp8", "int4", "mxfp8", "nvfp4")
    ]
    # Fp8 has a byte, int4 half a byte and a 16-bit scale for 32 of them; embeddings stay.
    assert sizes[1] / sizes[0] == pytest.approx(0.5, abs=0.05)
    assert sizes[2] / sizes[0] == pytest.approx(4.5 / 16, abs=0.05)
    # Mxfp8 has a byte of scale for 32 of them, nvfp4 for 16.
    assert sizes[3] / sizes[1] == pytest.approx(8.25 / 8, abs=0.01)
    assert sizes[4] / sizes[2] == pytest.approx(1, abs=0.01)
    rates = [
        planned(capsys, *given, "--weights", name)["tokens_per_s"]
        for name in ("bf16", "mxfp8", "nvfp4")
    ]
    assert rates == sorted(set(rates))
    wide, narrow = (planned(capsys, *given, "--kv-dtype", name) for name in ("float32", "bfloat16"))
    blocks = [each["policy"]["num_kv_blocks"] for each in (wide, narrow)]
    caches = [each["device_memory"]["KV cache"] for each in (wide, narrow)]
    assert caches[0] / blocks[0] == 2 * caches[1] / blocks[1]


@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_lengths_come_from_a_file(
    suffix: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dice, path = random.Random(suffix), tmp_path / f"lengths.{suffix}"
    lengths = [(dice.randint(1, 300), dice.randint(1, 20)) for _ in range(12)]
    rows = [{"prompt_tokens": prompt, "generated_tokens": count} for prompt, count in lengths]
    if suffix == "jsonl":
        # Ends of lines elsewhere, and in JSON characters of a text.
        lines = [json.dumps(row | {"text": "a\u2028b\x85c"}, ensure_ascii=False) for row in rows]
        path.write_text("\r\n".join([*lines, ""]), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    plan = find_plan(ModelSpec.from_directory(model), NODE, Workload.of_rows(tuple(lengths)))
    given = ("--model", model, "--hardware", "t4", *MEMORY, "--lengths", str(path))
    found = planned(capsys, *given)
    assert (found["num_rows"], found["tokens_per_s"]) == (12, plan.tokens_per_s)
    assert planned(capsys, *given, "--num-rows", "60")["num_rows"] == 60


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"prompt_tokens": 3}', "row 0 has generated_tokens None"),
        ('{"prompt_tokens": 0, "generated_tokens": 1}', "row 0 has prompt_tokens 0"),
        ("[1]", "row 0 has prompt_tokens None"),
        ("{", "cannot be read"),
        ("", "has no rows"),
    ],
)
def test_bad_lengths_are_named(
    content: str, problem: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(content)
    assert run(["plan", "--model", model, "--hardware", "t4", "--lengths", str(path)]) == 2
    assert problem in capsys.readouterr().err


def test_an_instance_has_its_own_host() -> None:
    small, large = hardware_preset("g6.xlarge"), hardware_preset("G6.16xlarge")
    assert (small.num_cores, large.num_cores) == (2, 32)
    assert large.host_memory_bytes == pytest.approx(16 * small.host_memory_bytes, rel=1e-6)
    assert (
        small.gpu_memory_bytes == large.gpu_memory_bytes == HARDWARE_PRESETS["l4"].gpu_memory_bytes
    )


@pytest.mark.parametrize("task", ["generate", "score"])
def test_a_job_of_generate_is_predicted_to_take_what_the_command_says(
    task: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time, speed and words of both, with one file of rates and one of lengths."""
    node, lengths = tmp_path / "node.json", tmp_path / "lengths.jsonl"
    HOST.to_file(node)
    rows = [{"prompt_tokens": 40 + row, "generated_tokens": 1 + row % 9} for row in range(50)]
    lengths.write_text("\n".join(map(json.dumps, rows)))
    given = ("--model", model, "--hardware", str(node), "--lengths", str(lengths), "--task", task)
    found = planned(capsys, *given, "--num-rows", "500", "--price-per-hour", "2")
    workload = Workload.of_rows(tuple((r["prompt_tokens"], r["generated_tokens"]) for r in rows))
    kwargs = map_batches_kwargs(
        model,
        workload=replace(workload, num_rows=500),
        engine_config={"hardware": str(node), "device": "cpu"},
        **({"task": task} if task != "generate" else {}),
    )
    job = kwargs.plan.prediction
    assert (found["seconds"], found["tokens_per_s"]) == (job.running_s, job.tokens_per_s)
    assert (found["loading_seconds"], found["writing_seconds"]) == (job.loading_s, job.writing_s)
    assert found["cost"] == job.cost(2.0)
    assert run(["plan", *given, "--num-rows", "500"]) == 0
    text, described = words(capsys.readouterr().out), kwargs.plan.describe(2.0)
    verb, unit = {"generate": ("generate", "generated"), "score": ("read", "prompt")}[task]
    for one in (text, described):
        assert f"{unit} tokens/s" in one
    assert f"time to {verb} {format_seconds(job.running_s)}" in text
    assert f"{format_seconds(job.running_s)} to {verb}" in described
    if task == "score":
        assert found["generated_tokens"] == 0
        assert job.tokens_per_s == pytest.approx(500 * 64.5 / job.running_s)
        assert "generated" not in text
        assert "generated" not in described


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--deadline-hours", "-1"), "--deadline-hours is -1; it takes 0.000277778 to 8,760,000"),
        (("--deadline-hours", "nan"), "--deadline-hours is nan"),
        (("--deadline-hours", "inf"), "--deadline-hours is inf"),
        (
            ("--nodes", "1000000000"),
            "--nodes is 1,000,000,000; it takes a number from 1 to 100,000",
        ),
        (("--nodes", "-3"), "--nodes is -3"),
        (("--nodes", "65"), "--nodes is 65, and the job has 64 rows: a node needs at least one"),
        (("--price-per-hour", "inf"), "--price-per-hour is inf; it takes 0 to 1,000,000,000 USD"),
        (("--price-per-hour", "nan"), "--price-per-hour is nan"),
        (("--price-per-hour", "-2", "--currency", "EUR"), "0 to 1,000,000,000 EUR"),
        (("--currency", ""), "--currency is ''; it takes a name"),
        (("--task", "chat"), "unknown task 'chat'; known: classify, embed, generate, score"),
        (("--num-rows", "9" * 400), "--num-rows"),
        (("--prompt-len", "9" * 400), "a row has 999999"),
    ],
)
def test_numbers_that_make_no_sense_get_a_sentence(
    arguments: tuple[str, ...], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "--model", model, "--hardware", "t4", *JOB, *arguments]) == 2
    assert message in words(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("64", r"one row takes .* however many nodes there are; the deadline is 1.0 s"),
        (
            str(10**10),
            r"to end in 1.0 s, the job needs [\d,]+ nodes of t4 or more, and takes .* on 1:",
        ),
    ],
)
def test_a_deadline_that_cannot_be_met_gets_a_sentence(
    rows: str, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = (*JOB, "--num-rows", rows, "--deadline-hours", str(1 / 3600), "--gen-len", "64")
    assert run(["plan", "--model", model, "--hardware", "t4", *job, "--schedule", "in_place"]) == 1
    assert re.search(message, words(capsys.readouterr().err))


def test_here_is_this_machine(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_node, "this_node", lambda: HOST)
    found = planned(capsys, "--model", model, "--hardware", "here", *JOB)
    plan = find_plan(ModelSpec.from_directory(model), HOST, WORKLOAD)
    assert (found["hardware"], found["seconds"]) == ("no gpu", plan.job.seconds)


@pytest.mark.parametrize("price", ["Infinity", "NaN", "1e300", "true", "0", "9" * 400])
def test_prices_that_make_no_sense_are_refused(
    price: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prices.json"
    file.write_text(f'{{"g6.8xlarge": {price}}}')
    assert run(["plan", "--model", model, *JOB, "--prices", str(file)]) == 2
    assert "g6.8xlarge has the price" in words(capsys.readouterr().err)


@pytest.mark.parametrize(("num_kv_blocks", "num_windowed"), [(4096, (64 + 4) * 5 + 16), (300, 0)])
def test_blocks_of_layers_with_windows_are_told(num_kv_blocks: int, num_windowed: int) -> None:
    policy = Policy(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_prefill_chunk_tokens=512,
        num_kv_blocks=num_kv_blocks,
    )
    model, node = model_preset("gpt-oss-20b"), hardware_preset("l4")
    plan = find_plan(
        model, node, WORKLOAD, schedule="layer_by_layer", policy=policy, max_model_len=4096
    )
    told = [f"{num_windowed} in layers with a window of 128 tokens"] * (num_windowed > 0)
    assert [text for name, text in _policy_rows(plan) if not name] == told
