"""Batch scripts as they are sent."""

from dataclasses import replace

import pytest

from snakemake_executor_plugin_mantik.common.errors import SiteRejected, UserError
from snakemake_executor_plugin_mantik.jobs.spec import Resources
from snakemake_executor_plugin_mantik.sites.authentication import Bearer
from snakemake_executor_plugin_mantik.sites.base import SharedFile, Submission
from snakemake_executor_plugin_mantik.sites.firecrest.script import (
    SchedulerName,
    scheduler_job_name,
    scheduler_script,
    transfer_script,
)
from tests.support import virtualtime
from tests.support.benches import firecrest_site_at

TAG = "6f1c2a9e-0b1d-4c58-9a57-3f6d0a8b7e21"
JOB = Submission(
    TAG,
    "train: fold=1,model='größer'",
    "#!/bin/bash\n# Job\necho hi\n",
    Resources(
        queue="normal",
        runtime_s=5400,
        nodes=2,
        cpus_per_task=16,
        gpus_per_node=4,
        memory_mib_per_node=65536,
        account="g34",
        reservation="maint",
        constraint="gpu",
        qos="debug",
    ),
    after=("7", "12"),
)
PBS = Resources(
    queue="workq",
    runtime_s=90_061,
    nodes=2,
    tasks=8,
    cpus_per_task=4,
    gpus_per_node=1,
    memory_mib_per_node=2048,
    account="g34",
)


def test_slurm() -> None:
    assert scheduler_script(JOB, "slurm", "/scratch/me/ws") == (
        "#!/bin/bash\n"
        f"#SBATCH --job-name=train_fold_1_model_gr_er-{TAG}\n"
        "#SBATCH --partition=normal\n"
        "#SBATCH --account=g34\n"
        "#SBATCH --qos=debug\n"
        "#SBATCH --reservation=maint\n"
        "#SBATCH --constraint=gpu\n"
        "#SBATCH --time=0-01:30:00\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --cpus-per-task=16\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH --mem=65536M\n"
        "#SBATCH --no-requeue\n"
        '#SBATCH --output="/scratch/me/ws/.mantik/jobs/%j.out"\n'
        "#SBATCH --dependency=afterany:7:12\n"
        "_m_scheduler_output=/scratch/me/ws/.mantik/jobs/$SLURM_JOB_ID.out\n"
        "# Job\necho hi\n"
    )


def test_pbs() -> None:
    assert scheduler_script(replace(JOB, resources=PBS), "pbs", "/work/me/ws") == (
        "#!/bin/bash\n"
        "#PBS -S /bin/bash\n"
        f"#PBS -N train_fold_1_model_gr_er-{TAG}\n"
        "#PBS -q workq\n"
        "#PBS -P g34\n"
        "#PBS -l select=2:ncpus=16:mpiprocs=4:ngpus=1:mem=2048mb\n"
        "#PBS -l place=scatter\n"
        "#PBS -l walltime=25:01:01\n"
        "#PBS -r n\n"
        '#PBS -o "/work/me/ws/.mantik/jobs/"\n'
        "#PBS -j oe\n"
        "#PBS -W depend=afterany:7:12\n"
        "# Job\necho hi\n"
    )


def test_resources_that_the_scheduler_lacks() -> None:
    with pytest.raises(UserError):
        scheduler_script(replace(JOB, resources=Resources(qos="high")), "pbs", "/w")


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_login_shells(scheduler: SchedulerName) -> None:
    job = replace(JOB, resources=Resources(), login_shell=True)
    assert scheduler_script(job, scheduler, "/w").startswith("#!/bin/bash -l\n#")


def test_scripts_without_a_first_line_of_their_own() -> None:
    script = scheduler_script(replace(JOB, script="exit 3"), "slurm", "/w")
    assert script.startswith("#!/bin/bash\n#SBATCH")
    assert script.endswith("\nexit 3")


@pytest.mark.parametrize("hooks", [{"before_on_login": ("a",)}, {"after_on_login": ("a",)}])
def test_hooks_on_the_login_node(hooks: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(SiteRejected, match="login node"):
        scheduler_script(
            Submission(TAG, "x", "", Resources(), **hooks),  # type: ignore[arg-type]
            "slurm",
            "/w",
        )


@pytest.mark.parametrize("name", ["", "ü", "1st", "a" * 300, "rule: x=1, y='z\n'", "-x", "_"])
def test_names_end_with_the_tag(name: str) -> None:
    found = scheduler_job_name(name, TAG)
    assert found.endswith(f"-{TAG}")
    assert len(found) <= 64
    assert found[0].isalpha()
    assert found.replace(".", "").replace("-", "").replace("_", "").isalnum()


def test_transfer_jobs() -> None:
    directives = ("#SBATCH --time=15", "#SBATCH -A {account}")
    assert transfer_script("slurm", directives, "/w", "g34", "true") == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=mantik-transfer\n"
        '#SBATCH --output="/w/%j.out"\n'
        "#SBATCH --time=15\n"
        "#SBATCH -A g34\n"
        "set -e\n"
        "true\n"
    )
    with pytest.raises(SiteRejected, match="account"):
        transfer_script("slurm", directives, "/w", None, "true")


@pytest.mark.parametrize(
    "shared",
    [
        SharedFile('https://store/file"\noutput = "/home/me/.bashrc'),
        SharedFile("https://store/file?a=b\r\nproxy = https://elsewhere"),
        SharedFile("https://store/a file"),
        SharedFile("file:///etc/passwd"),
        SharedFile("https://unicore/rest/core/storages/WORK/files/x", "unicore"),
    ],
)
def test_an_address_that_is_more_than_one_option_of_curl_is_not_used(shared: SharedFile) -> None:
    site = firecrest_site_at("https://f.example.org", Bearer("t"))
    assert virtualtime.run(site.start_import(shared, "bundle/imported/1")) is None
