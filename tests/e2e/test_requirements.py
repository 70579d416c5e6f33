"""A virtual environment that a site makes of requirements, with the real pip and no network."""

import sys

from tests.support.workflows import UNTRACKED, Project

BACKEND = r"""
import zipfile

def build_wheel(directory, settings=None, metadata=None):
    name = "answer-1.0-py3-none-any.whl"
    info = "answer-1.0.dist-info"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        wheel.write("answer.py")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: answer\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


def test_two_jobs_at_once_make_it_once(project: Project) -> None:
    project.config.write_text(
        f"""{project.place.config}
Environment:
  Python: {{Path: env/ml, Requirements: requirements.txt}}
  Variables: {{PATH: "{sys.prefix}/bin:/usr/bin:/bin", PIP_NO_CACHE_DIR: "1"}}
"""
    )
    project.extra.update(UNTRACKED)
    project.write("requirements.txt", "--no-index\n./answer\n")
    project.write("answer/answer.py", "NUMBER = 42\n")
    project.write("answer/backend.py", BACKEND)
    project.write(
        "answer/pyproject.toml",
        """
        [build-system]
        requires = []
        build-backend = "backend"
        backend-path = ["."]
        [project]
        name = "answer"
        version = "1.0"
        """,
    )
    project.write(
        "Snakefile",
        """
        rule all:
            input: "a.txt", "b.txt"

        rule ask:
            output: "{x}.txt"
            shell: "python -c 'import answer, sys; print(answer.NUMBER, sys.prefix)' > {output}"
        """,
    )

    project.run("-j", "2").ok()

    said = project.read("a.txt")
    assert said == project.read("b.txt")
    number, place = said.split()
    assert number == "42"
    (content,) = (project.workspace / ".mantik/python/env/ml").iterdir()
    assert place == f"{content.resolve()}/1"
    assert sorted(path.name for path in content.iterdir()) == ["1", "1.lock", "1.log"]
