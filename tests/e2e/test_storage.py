"""Storage plugins: this machine fetches and stores, the site sees files and no credentials."""

from tests.e2e.test_secrets import leaks
from tests.support.s3 import S3
from tests.support.workflows import Project, tells, with_snakemake


def test_s3(s3: S3, either: Project) -> None:
    client = s3.client()
    client.create_bucket(Bucket=either.place.name)
    client.put_object(Bucket=either.place.name, Key="in/a b.txt", Body=b"stored\n")
    either.extra |= s3.environment
    either.write(
        "Snakefile",
        f"""
        rule all:
            input: storage("s3://{either.place.name}/out/final.txt")

        rule first:
            input: storage("s3://{either.place.name}/in/a b.txt")
            output: storage("s3://{either.place.name}/out/first.txt")
            shell: "cat {{input:q}} > {{output}}; env >> env.txt"

        rule final:
            input: rules.first.output
            output: storage("s3://{either.place.name}/out/final.txt")
            shell: "cat {{input}} {{input}} > {{output}}"
        """,
    )

    said = either.run().ok().output

    stored = client.get_object(Bucket=either.place.name, Key="out/final.txt")["Body"].read()
    assert stored == b"stored\nstored\n"
    assert leaks(either.place.server, words=(s3.secret_key,)) == []
    assert s3.secret_key not in said
    either.write(
        "Snakefile", either.read("Snakefile").replace("cat {input} {input}", "cat {input}")
    )
    either.run().ok()
    stored = client.get_object(Bucket=either.place.name, Key="out/final.txt")["Body"].read()
    assert stored == b"stored\n"


def test_full_jobs_need_no_credentials(s3: S3, project: Project) -> None:
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


def test_without_a_shared_file_system(project: Project) -> None:
    project.write("Snakefile", 'rule a:\n    output: "a"\n    shell: "touch {output}"\n')
    storage = ["--default-storage-provider", "fs", "--default-storage-prefix", "store"]

    said = project.run("--shared-fs-usage", "none", *storage).failed()
    tells(said, "--shared-fs-usage", "input-output, persistence, storage-local-copies")

    said = project.run("--shared-fs-usage", "input-output", "persistence", "sources").failed()
    tells(said, "storage-local-copies")
