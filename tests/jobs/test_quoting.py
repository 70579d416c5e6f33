"""What a user writes reaches the process as it is written."""

import shlex

import pytest

from snakemake_executor_plugin_mantik.common.errors import UserError
from snakemake_executor_plugin_mantik.jobs.script import render_script
from snakemake_executor_plugin_mantik.jobs.spec import Apptainer, Environment
from tests.support.trial import NASTY, Trial

STAND_IN = """#!/bin/bash
printf '%s\\n' "$@" | sed 's/^/word: /'
echo "cwd: $APPTAINER_CWD, $APPTAINER_PWD"
echo "bind: $APPTAINER_BIND"
while [ "$1" != --run ] && [ $# -gt 0 ]; do case $1 in *.sif) shift; break ;; esac; shift; done
exec "$@"
"""


def test_values_are_expanded_where_the_config_asks_for_it(trial: Trial) -> None:
    values = {
        "A": 'say "hi"\\ $HOME\\$X $(echo a  b) `echo c`',
        "B": "${A}!",
        "PLAIN": "a\\b'c",
        "CODE": """"$(printf "%s|" "a  b" 'c"d)' "it's $(echo "e  f")" \\" $((2 * (1 + 2))))" """
        """`printf "%s" "g  h"` ${NONE:-"i"}""",
    }
    environment = Environment(variables=values, expand=True)
    spec = trial.spec('printf "%s\\n" "$A" "$B" "$PLAIN" "$RULE" "$CODE"', environment=environment,
                      variables={"RULE": "$HOME"})  # fmt: skip
    first = 'say "hi"\\ /h o$X a b c'
    code = """"a  b|c"d)|it's e  f|"|6|" g  h """ + '"i"'
    ended = trial.run(spec, env={"HOME": "/h o"})
    assert ended.log == f"{first}\n{first}!\na\\b'c\n$HOME\n{code}\n"
    broken = Environment(variables={"A": "$(echo"}, expand=True)
    assert trial.run(trial.spec("echo no", environment=broken)).sure.failed_step == "variables"


def test_the_environments_variables_win_over_the_rules(trial: Trial) -> None:
    spec = trial.spec(
        "echo $A $B $C",
        variables={"A": "rule", "B": "rule"},
        environment=Environment(variables={"B": "config", "C": "config"}),
    )
    assert trial.run(spec).log == "rule config config\n"


def test_names_of_the_script_itself_are_the_users_too(trial: Trial) -> None:
    names = ("code", "line", "path", "unique", "owner", "i", "IFS", "POSIXLY_CORRECT", "TZ")
    variables = dict.fromkeys(names, "mine")
    spec = trial.spec('echo "$code $line $path $i"', environment=Environment(variables=variables))
    assert trial.run(spec).log == "mine mine mine mine\n"


@pytest.mark.parametrize(
    "values",
    [
        {"environment": Environment(variables={"A-B": "x"})},
        {"environment": Environment(variables={"A": "x\0y"})},
        {"environment": Environment(variables={"A": "x" * 131_072})},
        {"variables": {"x;touch bad;": "x"}},
        {"secrets": ("a b",)},
        {"command": "echo \0"},
    ],
)
def test_what_no_script_can_carry_is_refused(trial: Trial, values: dict[str, object]) -> None:
    with pytest.raises(UserError):
        render_script(trial.spec(**{"command": ":", **values}))  # type: ignore[arg-type]


HOSTILE = "$(touch bad) `touch bad`; touch bad & touch bad | 'x' \"y\" \\ \n touch bad"


def test_hostile_texts_do_no_harm(trial: Trial) -> None:
    spec = trial.spec(
        ":",
        name=f"name\ntouch bad\n{HOSTILE}",
        shell="bash",
        environment=Environment(variables={"A": HOSTILE}),
    )
    assert trial.run(spec).returned == 0
    assert not (trial.workspace / "bad").exists()
    assert not (trial.start_folder / "bad").exists()


def test_apptainer_gets_its_words(trial: Trial) -> None:
    trial.program("apptainer", STAND_IN)
    trial.write("env/it's.sif")
    options = (
        "--nv",
        "-B",
        "$DATA:/data",
        "${DATA}x",
        "$DATA",
        "$STAR",
        "*",
        shlex.quote(HOSTILE),
        "$(touch bad)",
        "a b",
        "'q r'",
        """--env="A='$DATA'"'$DATA'\\$DATA""",
        r'"\$DATA\"`touch bad`$(touch bad)\x"',
        "$1$$",
        "it's",
        "''",
    )
    spec = trial.spec(
        "pwd; exit 3",
        environment=Environment(
            apptainer=Apptainer("env/it's.sif", options),
            variables={"DATA": "/p/da ta * $(x)", "STAR": "*"},
        ),
    )
    ended = trial.run(spec)
    data = "/p/da ta * $(x)"
    words = ["run", "--nv", "-B", f"{data}:/data", f"{data}x", data, "*", "*"]
    words += [*HOSTILE.split("\n"), "$(touch bad)", "a b", "q r"]
    words += [f"--env=A='{data}'$DATA$DATA", r'$DATA"`touch bad`$(touch bad)\x']
    words += ["$1$$", "it's", ""]
    words += ["env/it's.sif", "bash", "-c", "pwd; exit 3"]
    lines = [f"word: {word}" for word in words]
    assert ended.log.split("cwd: ")[0].splitlines() == lines
    assert ended.returned == 3
    assert not (trial.workspace / "bad").exists()


def test_options_and_paths_are_expanded_where_the_config_asks_for_it(trial: Trial) -> None:
    trial.program("apptainer", STAND_IN)
    image = trial.write("it's/me.sif")
    words = {
        "$DATA:/data": "/p/da ta *:/data",
        "--host=$(printf '%s' \"a  b\" | tr a c)": "--host=c  b",
        '"${NONE:-x} `echo y`"$(echo z)': "x yz",
        "'$(echo no)$DATA'": "$(echo no)$DATA",
        r"\$(DATA)": "$(DATA)",
        '"\\$DATA"': "$DATA",
        "*": "*",
        "~/x": "/h o/x",
        "A=~/x": "A=~/x",
        'it"\'"s': "it's",
        "{a,b}": "{a,b}",
        "''": "",
    }
    environment = Environment(
        apptainer=Apptainer("$ROOT/it's/$(whoami >&2; echo me).sif", tuple(words)),
        variables={"DATA": "/p/da ta *", "HOME": "/h o"},
        expand=True,
    )
    root = {"ROOT": str(trial.workspace)}
    ended = trial.run(trial.spec(":", environment=environment, variables=root))
    lines = [*words.values(), *str(image).split("\n"), "bash", "-c", ":"]
    assert [line for line in ended.log.splitlines() if line.startswith("word: ")] == [
        f"word: {line}" for line in ["run", *lines]
    ]
    for apptainer in (Apptainer("$(false)"), Apptainer(str(image), ("$(",))):
        environment = Environment(apptainer=apptainer, expand=True)
        ended = trial.run(trial.spec("touch bad", environment=environment))
        assert ended.sure.failed_step == "image", ended.log
        assert "cannot be expanded" in ended.log
    assert not (trial.workspace / "bad").exists()


def test_of_the_virtual_environment_too(trial: Trial) -> None:
    trial.write("me/bin/activate", "echo activated")
    spec = trial.spec(
        "echo it",
        environment=Environment(python="$ROOT/me", expand=True),
        variables={"ROOT": str(trial.workspace)},
    )
    assert trial.run(spec).log == "activated\nit\n"
    literal = trial.spec(environment=Environment(python="$ROOT/me"), variables=spec.variables)
    assert trial.run(literal).sure.failed_step == "python"


def test_of_tildes_only_the_home_directory_in_front_is_expanded(trial: Trial) -> None:
    trial.program("apptainer", STAND_IN)
    trial.write("x.sif")
    words = {
        "~/x:/y": "/h o/x:/y",
        "~/$A/'b c'*": "/h o/a/b c*",
        "~": "/h o",
        "~/": "/h o/",
        "'~/x'": "~/x",
        r"\~/x": "~/x",
        "~'/x'": "~/x",
        "~root/x": "~root/x",
        "~+": "~+",
        "A=~/x": "A=~/x",
        "--bind=~/x:/y": "--bind=~/x:/y",
        "/x:~/y": "/x:~/y",
    }
    environment = Environment(
        apptainer=Apptainer("x.sif", tuple(words)), variables={"A": "a", "HOME": "/h o"}
    )
    log = trial.run(trial.spec("true", environment=environment)).log
    seen = [line.removeprefix("word: ") for line in log.splitlines() if line.startswith("word: ")]
    assert seen[1 : len(words) + 1] == list(words.values())


def test_apptainer_finds_the_workspace(trial: Trial) -> None:
    trial.program("apptainer", STAND_IN)
    trial.write("x.sif")
    environment = Environment(apptainer=Apptainer("x.sif"))
    ended = trial.run(trial.spec("pwd", environment=environment), env={"APPTAINER_BIND": "/data"})
    place = trial.workspace
    assert f"cwd: {place}, {place}\nbind: /data,{place}\n{place}\n" in ended.log
    own = Environment(apptainer=Apptainer("x.sif", ("--cwd", "/data")))
    assert "cwd: , \n" in trial.run(trial.spec(environment=own)).log


def test_datasets_are_mounted_unless_the_workspace_is_in_them(trial: Trial) -> None:
    above = str(trial.workspace.parent)
    script = render_script(trial.spec("true", datasets=("/p/data", above, f"{above}-2"))).text
    assert '"source=/p/data","destination=/p/data",ro' in script
    assert f'"source={above}-2"' in script
    assert f'"source={above}"' not in script


def test_apptainer_is_started_by_srun_in_an_allocation(trial: Trial) -> None:
    trial.program("apptainer", STAND_IN)
    trial.program("srun", '#!/bin/sh\necho "srun starts $1"; exec "$@"\n')
    trial.write("x.sif")
    spec = trial.spec("echo hi", environment=Environment(apptainer=Apptainer("x.sif")))
    ended = trial.run(spec, env={"SLURM_JOB_ID": "4"})
    assert ended.log.startswith("srun starts apptainer\n")
    assert "srun starts" not in trial.run(trial.spec(environment=spec.environment)).log


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_image_or_apptainer_is_told(trial: Trial, there: bool) -> None:
    if there:
        trial.program("apptainer", STAND_IN)
    environment = Environment(apptainer=Apptainer(f"{NASTY}.sif"))
    ended = trial.run(trial.spec(environment=environment))
    assert ended.sure.failed_step == "image"
    assert ("there is no image" if there else "no Apptainer on this node") in ended.log
