"""The command `drafters`: what each command line becomes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from drafters.cli import command_line, scripts_root

ROOT = scripts_root()


@pytest.mark.parametrize(
    ("recipe", "script"),
    [
        ("smollm2_135m_eagle", "eagle.py"),
        ("smollm2_135m_medusa", "medusa.py"),
        ("smollm2_135m_eagle3", "head.py"),
        ("tiny_medusa2", "medusa2.py"),
    ],
)
def test_train_takes_the_script_of_the_recipe_s_head(recipe: str, script: str) -> None:
    command = command_line(["train", recipe, "train.max_steps=3"], ROOT)
    assert command[:4] == [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    assert command[4:] == [str(ROOT / "train" / script), str(ROOT / f"recipes/{recipe}.yaml"), "train.max_steps=3"]


def test_train_takes_a_launcher_by_name_and_a_recipe_by_path(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text((ROOT / "recipes/tiny_eagle.yaml").read_text())
    command = command_line(["train", "--launch", "ddp", "--num-processes", "2", str(own)], ROOT)
    launcher = ["--config_file", str(ROOT / "recipes/accelerate/ddp.yaml"), "--num_processes", "2"]
    assert command[4:] == [*launcher, str(ROOT / "train/eagle.py"), str(own)]


def test_what_follows_the_command_is_the_script_s_own() -> None:
    command = command_line(["eval", "alpha", "runs/x", "--temperature", "0", "1"], ROOT)
    assert command == [sys.executable, str(ROOT / "eval/alpha.py"), "runs/x", "--temperature", "0", "1"]
    for name in ("export", "import", "prepare-model", "prepare-data", "regenerate"):
        assert Path(command_line([name, "--help"], ROOT)[1]).is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["eval", "alfa"], "named 'alfa'; did you mean alpha?"),
        (["train", "smollm2_135m_eagel"], "did you mean smollm2_135m_eagle"),
        (["train", "tiny_eagle", "--launch", "dpp"], "did you mean ddp?"),
        (["train", "tiny_eagle", "train.max_step=3"], "did you mean max_steps?"),
    ],
)
def test_names_that_are_nearly_right(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        command_line(argv, ROOT)
    assert message in str(error.value)


def test_recipes_are_listed_with_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["recipes"], ROOT) == []
    printed = capsys.readouterr().out
    assert (
        "smollm2_135m_eagle3 " in printed and "EAGLE-3 on SmolLM2" in printed and "yaml-language-server" not in printed
    )
