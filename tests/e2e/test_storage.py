"""Storage plugins: this machine fetches and stores, the site sees files and no credentials."""

from pathlib import Path

import pytest

from tests.e2e.test_secrets import leaks, new_secret
from tests.support.s3 import S3, SOFTWARE
from tests.support.workflows import UNTRACKED, Project, tells, until, with_snakemake

full = pytest.mark.software("Snakemake at a site")
at_a_real_one = pytest.mark.parametrize(
    "s3", [pytest.param("rclone", marks=pytest.mark.software(SOFTWARE))], indirect=True
)


def test_s3(s3: S3, project: Project) -> None:
    client = s3.client()
    client.create_bucket(Bucket=project.place.name)
    client.put_object(Bucket=project.place.name, Key="in/a b.txt", Body=b"stored\n")
    project.extra |= s3.environment
    project.write(
        "Snakefile",
        f"""
        rule all:
            input: storage("s3://{project.place.name}/out/final.txt")

        rule first:
            input: storage("s3://{project.place.name}/in/a b.txt")
            output: storage("s3://{project.place.name}/out/first.txt")
            shell: "cat {{input:q}} > {{output}}; env >> env.txt"

        rule final:
            input: rules.first.output
            output: storage("s3://{project.place.name}/out/final.txt")
            shell: "cat {{input}} {{input}} > {{output}}"
        """,
    )

    said = project.run().ok().output

    stored = client.get_object(Bucket=project.place.name, Key="out/final.txt")["Body"].read()
    assert stored == b"stored\nstored\n"
    assert leaks(project.place.server, words=(s3.secret_key,)) == []
    assert s3.secret_key not in said
    project.write(
        "Snakefile", project.read("Snakefile").replace("cat {input} {input}", "cat {input}")
    )
    project.run().ok()
    stored = client.get_object(Bucket=project.place.name, Key="out/final.txt")["Body"].read()
    assert stored == b"stored\n"


@full
@at_a_real_one
def test_nested_snakemakes_need_no_credentials(s3: S3, project: Project) -> None:
    client = s3.client()
    client.create_bucket(Bucket="full")
    client.put_object(Bucket="full", Key="in/a.txt", Body=b"stored\n")
    project = Project(project.directory, with_snakemake(project.place), dict(s3.environment))
    project.write(
        "Snakefile",
        """
        rule double:
            input: storage("s3://full/in/{name}.txt")
            output: storage("s3://full/out/{name}.txt")
            run:
                with open(input[0]) as given, open(output[0], "w") as made:
                    made.write(given.read() * 2)

        rule all:
            default_target: True
            input: storage("s3://full/out/a.txt")
        """,
    )

    project.run().ok()

    stored = client.get_object(Bucket="full", Key="out/a.txt")["Body"].read()
    assert stored == b"stored\nstored\n"


@full
@at_a_real_one
@pytest.mark.nightly
def test_jobs_reach_the_storage_themselves(s3: S3, firecrest: Project) -> None:
    bucket = "none"
    client = s3.client()
    client.create_bucket(Bucket=bucket)
    for name in ("a b", "c'd"):
        client.put_object(Bucket=bucket, Key=f"w/in/{name}.txt", Body=f"{name}\n".encode())
    secret, plain = new_secret()
    project = Project(
        firecrest.directory,
        with_snakemake(firecrest.place),
        {"MY_TOKEN": secret, **UNTRACKED, **s3.environment},
    )
    project.write(
        "Snakefile",
        r"""
        envvars: "MY_TOKEN"
        localrules: here

        rule all:
            input: "out/here.txt", local("list.txt")

        rule first:
            input: "in/{name}.txt"
            output: "out/{name}.1.txt", temp("out/{name}.temp")
            log: "log/{name}.txt"
            shell:
                "cat {input:q} > {output[0]:q}; date > {output[1]:q}; echo said > {log:q};"
                " printf %s \"$MY_TOKEN\" | wc -c >> {output[0]:q}"

        rule second:
            input: rules.first.output
            output: "out/{name}.2.txt"
            benchmark: "bench/{name}.tsv"
            group: "pair"
            run:
                assert os.environ["SNAKEMAKE_STORAGE_S3_SECRET_KEY"]
                shell("cat {input[0]:q} {input[0]:q} > {output:q}")

        rule third:
            input: rules.second.output
            output: directory("dir/{name}")
            group: "pair"
            script: "scripts/third.py"

        checkpoint fourth:
            input: expand("dir/{name}", name=["a b", "c'd"])
            output: "names.txt"
            shell: "cat {input[0]:q}/x {input[1]:q}/x | sort -u > {output}"

        def listed(wildcards):
            with checkpoints.fourth.get().output[0].open() as file:
                return "in/a b.txt" if "17" not in file.read() else []

        rule fifth:
            input: listed
            output: "out/5.txt"
            shell: "cat {input:q} > {output}"

        rule here:
            input: "names.txt", "out/5.txt"
            output: "out/here.txt", local("list.txt")
            shell: "cat {input} > {output[0]}; cp {output[0]} {output[1]}"
        """,
    )
    project.write(
        "scripts/third.py",
        """
        import os, helper
        os.makedirs(snakemake.output[0])
        with open(snakemake.input[0]) as read, open(snakemake.output[0] + "/x", "w") as made:
            made.write(helper.upper(read.read()))
        """,
    )
    project.write("scripts/helper.py", "def upper(text):\n    return text.upper()\n")

    said = project.run("--verbose", *_in_bucket(bucket)).ok().output

    def stored(key: str) -> str:
        body: bytes = client.get_object(Bucket=bucket, Key=f"w/{key}")["Body"].read()
        return body.decode()

    length = len(secret)
    assert stored("out/c'd.2.txt") == f"c'd\n{length}\n" * 2
    assert stored("names.txt") == f"{length}\nA B\nC'D\n"
    assert stored("out/here.txt") == stored("names.txt") + "a b\n" == project.read("list.txt")
    assert stored("log/a b.txt") == "said\n"
    assert stored("bench/a b.tsv").startswith("s\th:m:s")
    keys = {each["Key"] for each in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert not [key for key in keys if key.endswith(".temp")]
    for copies in (
        project.directory / ".snakemake/storage", project.workspace / ".snakemake/storage",
        project.workspace / ".mantik/storage",
    ):  # fmt: skip
        assert [path for path in copies.rglob("*") if path.is_file()] == []
    secrets = (plain, s3.secret_key)
    assert leaks(project.directory, project.place.server, words=secrets) == []
    assert not [word for word in secrets if word in said]
    assert "Nothing to be done" in project.run(*_in_bucket(bucket)).ok().output


def _in_bucket(bucket: str) -> list[str]:
    """The options with which all files are in a bucket, and jobs fetch and store themselves."""
    prefix = f"s3://{bucket}/w"
    return [
        "--default-storage-provider", "s3", "--default-storage-prefix", prefix,
        "--shared-fs-usage", "none",
    ]  # fmt: skip


@full
def test_what_jobs_store_in_a_directory(project: Project, tmp_path: Path) -> None:
    """The fs plugin, whose directory both machines see; a failure, and what follows it."""
    store = tmp_path / "store"
    (store / "in").mkdir(parents=True)
    (store / "in" / "x").write_text("1\n")
    project = Project(project.directory, with_snakemake(project.place), dict(UNTRACKED))
    project.write(
        "Snakefile",
        """
        rule all:
            input: "found.txt"

        rule make:
            input: "in/x"
            output: directory("made"), touch("done")
            log: "make.log"
            shadow: "minimal"
            shell: "mkdir {output[0]}; cat {input} > {output[0]}/y; cp {input} {log}; grep 2 {log}"

        rule find:
            input: rules.make.output
            output: "found.txt"
            shell: "cat {input[0]}/y > {output}"
        """,
    )
    options = [
        "--default-storage-provider", "fs", "--default-storage-prefix", str(store),
        "--shared-fs-usage", "none", "--latency-wait", "1",
    ]  # fmt: skip

    tells(project.run(*options).failed(), "rule make")
    assert (store / "make.log").read_text() == "1\n"
    assert not (store / "made").exists()

    (store / "in" / "x").write_text("12\n")
    project.run(*options).ok()
    assert (store / "found.txt").read_text() == "12\n"
    assert (store / "done").exists()
    assert not project.exists("made")


@full
def test_what_a_job_stored_after_a_crash_is_kept(project: Project, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (store / "in").write_text("1\n")
    project = Project(project.directory, with_snakemake(project.place), dict(UNTRACKED))
    project.write(
        "Snakefile",
        f"""
        rule slow:
            input: "in"
            output: "out"
            shell:
                "echo run >> {tmp_path}/runs; until [ -e {tmp_path}/go ]; do sleep 0.1; done;"
                " cp {{input}} {{output}}"
        """,
    )
    options = [
        "--default-storage-provider", "fs", "--default-storage-prefix", str(store),
        "--shared-fs-usage", "none", "--rerun-incomplete",
    ]  # fmt: skip
    first = project.start(*options)
    until((tmp_path / "runs").exists, "the job")

    first.kill()
    (tmp_path / "go").touch()
    until((store / "out").exists, "the output")
    project.run("--unlock", plain=True)
    project.run(*options).ok()

    assert (store / "out").read_text() == "1\n"
    assert (tmp_path / "runs").read_text() == "run\n"

    (store / "in").write_text("2\n")
    project.run(*options).ok()
    assert (store / "out").read_text() == "2\n"


def test_half_of_a_shared_file_system(project: Project) -> None:
    project.write("Snakefile", 'rule a:\n    output: "a"\n    shell: "touch {output}"\n')
    storage = ["--default-storage-provider", "fs", "--default-storage-prefix", "store"]

    said = project.run("--shared-fs-usage", "storage-local-copies", *storage).failed()
    tells(said, "names storage-local-copies without input-output")
    said = project.run("--shared-fs-usage", "input-output", "persistence", "sources").failed()
    tells(said, "names input-output without storage-local-copies")

    project.run("--shared-fs-usage", "input-output", "storage-local-copies").ok()


def test_what_no_storage_can_hold(project: Project, tmp_path: Path) -> None:
    project.write(
        "Snakefile",
        """
        rule all:
            input: "piped.txt", "near.txt"

        rule writes:
            output: pipe("pipe")
            shell: "echo 1 > {output}"

        rule reads:
            input: "pipe"
            output: "piped.txt"
            shell: "cat {input} > {output}"

        rule near:
            output: temp("near", group_jobs=True)
            group: "near"
            shell: "echo 1 > {output}"

        rule bare:
            input: "near"
            output: touch("bare")
            group: "near"

        rule far:
            input: "near", "bare"
            output: "near.txt"
            group: "near"
            shell: "cat {input} > {output}"
        """,
    )

    said = project.run(
        "--default-storage-provider", "fs", "--default-storage-prefix", str(tmp_path / "store"),
        "--shared-fs-usage", "none",
    ).failed()  # fmt: skip

    tells(said, "nothing submitted", "rule near makes a temp(…, group_jobs=True) file")
    tells(said, "rule bare has no command and is in a group")
    tells(said, "rule reads has files", "rule writes has files", "shares a pipe or service")
