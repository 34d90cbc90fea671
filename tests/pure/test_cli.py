"""The commands without a kernel: help, bad input in one line with status 2, drawings, lists, facts."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from treeattn.cli import COMMANDS, main


def arrays(**changes):
    rng = np.random.default_rng(0)
    found = {
        "q": rng.standard_normal((3, 2, 8), np.float32),
        "q_indptr": np.array([0, 3]),
        "k": rng.standard_normal((9, 1, 8), np.float32),
        "v": rng.standard_normal((9, 1, 8), np.float32),
        "kv_indptr": np.array([0, 9]),
    } | changes
    return {name: value for name, value in found.items() if value is not None}


@pytest.fixture
def case(tmp_path):
    path = tmp_path / "case.npz"
    np.savez(path, **arrays())
    return path


def refused(capsys, *argv):
    """Run a command that must fail with status 2 and return its one line."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("treeattn: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help(capsys, argv):
    assert main(argv) == 0
    assert "Usage: treeattn" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert "treeattn" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["fly"],
        ["run"],
        ["run", "--fly", "x.npz"],
        ["run", "x.npz", "--threads", "0"],
        ["bench", "--workload", "no such"],
        ["bench", "--list", "--against", "nobody"],
        ["bench", "--dtype", "float64"],
        ["demo", "extra"],
    ],
)
def test_wrong_use_gives_one_line(capsys, argv):
    if "nobody" in argv:
        argv = [word for word in argv if word != "--list"]
    refused(capsys, *argv)


def test_missing_file(capsys, tmp_path):
    assert f"{tmp_path / 'no.npz'}: No such file" in refused(capsys, "run", tmp_path / "no.npz")
    assert "No such file" in refused(capsys, "show", tmp_path / "no.json")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": None}, "q: expected in the case file"),
        ({"kv_indptr": None}, "kv_indptr"),
        ({"q": np.zeros((3, 2, 8))}, "float64"),
        ({"q": np.array([object()])}, "pickled"),
        ({"q_indptr": np.array([0, 4])}, "q_indptr"),
        ({"kv_indptr": np.array([0, 90])}, "kv_indptr"),
        ({"tree_parents": np.array([1, 0, 0]), "tree_indptr": np.array([0, 3])}, "cycle"),
        ({"tree_parents": np.array([-1, 0, 7]), "tree_indptr": np.array([0, 3])}, "tree_parents of sequence 0"),
    ],
)
def test_bad_arrays_give_one_line(capsys, tmp_path, changes, text):
    np.savez(tmp_path / "case.npz", **arrays(**changes))
    assert text in refused(capsys, "run", tmp_path / "case.npz")


def test_truncated_files_give_one_line(capsys, case):
    whole = case.read_bytes()
    for length in range(0, len(whole), 97):
        case.write_bytes(whole[:length])
        refused(capsys, "run", case)


def test_no_traceback_in_a_process(case):
    case.write_bytes(case.read_bytes()[:-30])
    code = "import sys; from treeattn.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(case)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


def test_show_draws_tree_and_mask(capsys, tmp_path):
    path = tmp_path / "draft.json"
    path.write_text("[-1, 0, 0, 1]")
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "draft: 4 nodes, 2 leaves, 3 levels" in shown
    assert "├── 1\n│   └── 3\n└── 2" in shown
    assert "█···\n██··\n█·█·\n██·█" in shown


def test_show_chooses_by_name(capsys, tmp_path):
    path = tmp_path / "trees.json"
    path.write_text(json.dumps({"one": [-1], "two": {"choices": [[0], [1]]}}))
    assert main(["show", str(path), "--name", "two"]) == 0
    assert "two: 3 nodes" in capsys.readouterr().out
    assert main(["show", str(path)]) == 0
    captured = capsys.readouterr()
    assert "one: 1 nodes" in captured.out
    assert "one, two" in captured.err
    assert "three" in refused(capsys, "show", path, "--name", "three")


def test_show_writes_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "t.json").write_text("[-1, 0]")
    assert main(["show", str(tmp_path / "t.json"), "--png", str(tmp_path / "t.png")]) == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "No such file" in refused_after_output(
        capsys, "show", tmp_path / "t.json", "--png", tmp_path / "no" / "t.png"
    )


def refused_after_output(capsys, *argv):
    capsys.readouterr()
    assert main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[", "{}", "[0]", '{"parents": 3}', "[-1, 5]", "nan", '"tree"', "[[[[", "null"])
def test_show_refuses_what_is_no_tree(capsys, tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    refused(capsys, "show", tmp_path / "t.json")


def test_bench_lists_workloads(capsys):
    assert main(["bench", "--list", "-w", "verify*", "-w", "star"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("verify ")
    assert lines[-1].startswith("star ")


def test_info(capsys):
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"]
    assert set(found["packages"]) >= {
        "tvm",
        "torch",
        "matplotlib",
        "safetensors",
        "gguf",
        "tokenizers",
        "pyopencl",
        "wgpu",
    }
    assert found["cache"]["folder"]
    assert main(["info"]) == 0
    assert "threads" in capsys.readouterr().out


def test_info_lists_devices_or_why_there_are_none(capsys):
    main(["info", "--json"])
    targets = json.loads(capsys.readouterr().out)["targets"]
    assert {name.partition(":")[0] for name in targets} == {"llvm", "cuda", "opencl", "webgpu"}
    for name, facts in targets.items():
        assert ":" in name or name == "llvm" or "; install" in facts["missing"] or "; pip install" in facts["missing"]


def test_info_says_why_something_is_missing():
    code = (
        "import sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name in ('torch', 'tvm') else find(name)\n"
        "from treeattn.cli import main\n"
        "sys.exit(main(['info']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install torch" in done.stdout
    assert "llvm     missing" in done.stdout


def test_a_name_that_no_terminal_shows(tmp_path):
    file = tmp_path / "t.json"
    file.write_text('{"\\ud800": [-1, 0]}')
    done = subprocess.run([sys.executable, "-m", "treeattn", "show", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("\\ud800: 2 nodes")


def test_an_output_that_cannot_be_written_is_named_as_given(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "t.json"
    file.write_text("[-1, 0]")
    for target, reason in ((tmp_path / "none" / "x.png", "No such file"), (tmp_path, "Is a directory")):
        assert main(["show", str(file), "--png", str(target)]) == 2
        assert capsys.readouterr().err.startswith(f"treeattn: {target}: {reason}")


def test_bench_looks_at_paths_before_it_measures(tmp_path, capsys):
    for option in ("--csv", "--plot"):
        assert main(["bench", "--as-is", option, str(tmp_path / "missing" / "file")]) == 2
        assert option in capsys.readouterr().err
