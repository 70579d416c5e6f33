from pathlib import Path
from typing import Any

import pytest

from snakemake_executor_plugin_mantik.config.environment import (
    image_upload,
    job_environment,
    script_limits,
)
from snakemake_executor_plugin_mantik.config.model import BackendConfig
from snakemake_executor_plugin_mantik.jobs.spec import Apptainer, ScriptLimits

PROJECT = Path("/home/p")


def config(**parts: Any) -> BackendConfig:
    return BackendConfig.model_validate(
        {"UnicoreApiUrl": "https://u.org", "Resources": {"Queue": "q"}, **parts}
    )


def image(path: str, kind: str = "local") -> BackendConfig:
    return config(Environment={"Apptainer": {"Path": path, "Type": kind, "Options": "--nv"}})


def test_an_image_keeps_its_place_in_the_project() -> None:
    made = image("env/./train.sif")
    assert job_environment(made, PROJECT).apptainer == Apptainer("env/train.sif", ("--nv",))
    assert image_upload(made.environment, PROJECT) == (
        Path("/home/p/env/train.sif"),
        "env/train.sif",
    )


@pytest.mark.parametrize("path", ["../shared/train.sif", "/abs/train.sif", "a/../../train.sif"])
def test_an_image_of_another_folder_gets_a_place_of_ours(path: str) -> None:
    upload = image_upload(image(path).environment, PROJECT)
    assert upload is not None
    assert upload[0] == PROJECT / path
    assert upload[1].startswith(".mantik/images/")
    assert upload[1].endswith("/train.sif")
    assert ".." not in upload[1]
    made = job_environment(image(path), PROJECT).apptainer
    assert made is not None
    assert made.image == upload[1]


@pytest.mark.parametrize("form", ["{project}/env/i.sif", "../p/env/i.sif", "{real}/env/i.sif"])
def test_an_image_in_the_project_has_its_place_there_however_it_is_written(
    tmp_path: Path, form: str
) -> None:
    real = tmp_path / "data" / "p"
    (real / "env").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    project = tmp_path / "home" / "p"
    project.symlink_to(real)
    (real / "env" / "i.sif").symlink_to("/elsewhere.sif")
    made = image(form.format(project=project, real=real))
    upload = image_upload(made.environment, project)
    assert upload is not None
    assert upload[0].parent.resolve() == real / "env"
    assert upload[1] == "env/i.sif"
    assert job_environment(made, project).apptainer == Apptainer("env/i.sif", ("--nv",))


def test_two_images_of_one_name_do_not_meet() -> None:
    one, two = (
        image_upload(image(path).environment, Path("/p")) for path in ("../a/i.sif", "../b/i.sif")
    )
    assert one is not None
    assert two is not None
    assert one[1] != two[1]


def test_srun_takes_the_cpus_that_the_job_has() -> None:
    plain = {"Queue": "q", "CPUsPerNode": 8}
    assert job_environment(config(), PROJECT).variables == {}
    assert job_environment(config(Resources=plain), PROJECT).variables == {
        "SRUN_CPUS_PER_TASK": "8"
    }
    assert job_environment(config(Resources=plain), PROJECT, 3).variables == {
        "SRUN_CPUS_PER_TASK": "3"
    }
    own = config(Resources=plain, Environment={"Variables": {"SRUN_CPUS_PER_TASK": 2, "A": 1}})
    assert job_environment(own, PROJECT, 3).variables == {"SRUN_CPUS_PER_TASK": "2", "A": "1"}


def test_the_settings_defaults_are_the_script_s() -> None:
    assert script_limits(config()) == ScriptLimits()
    assert script_limits(config(Site={"TermGrace": "9s"})) == ScriptLimits(grace_s=9)
