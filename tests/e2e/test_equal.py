"""A workflow gives the same at a site as with Snakemake's local executor, byte for byte."""

from tests.support.workflows import Project, tree

SNAKEFILE = r"""
    configfile: "config.yaml"
    shell.prefix("PREFIX=before; ")
    shell.suffix("; echo suffix >> suffixes.txt")

    localrules: all, here

    module other:
        snakefile: "other/Snakefile"
        config: {"word": "inner"}
        prefix: "sub"

    use rule * from other as other_*

    rule all:
        default_target: True
        input:
            expand("out/{x}/{y}.txt", x=["a", "b"], y=[1, 2]), "sub/word.txt", "sh.txt",
            "variables.txt", "made/deep/er/file", "here.txt"

    rule cells:
        input: "in.txt"
        output: "out/{x}/{y}.txt"
        log: "logs/deep/{x}-{y}.log"
        params:
            text="it's \"quoted\" $HOME `date`", number=lambda w: int(w.y) * 2,
            derived=lambda wildcards, input, threads: f"{input[0]}:{threads}",
        threads: 3
        resources:
            mem_mb=lambda wildcards, attempt: 100 * attempt, runtime=5, custom="some thing"
        shell:
            "cat {input} > {output}; printf '%s\n' {params.text:q} {params.number} "
            "{params.derived} {threads} {resources.mem_mb} {resources.runtime} "
            "{resources.custom:q} {wildcards.x} {rule} \"$PREFIX\" {config[word]} >> {output};"
            "echo told > {log}; echo {{braces}} '%s' >> {output}"

    rule sh:
        output: "sh.txt"
        resources: shell_exec="sh"
        shell: "echo ${{BASH_VERSION:-none}} > {output}"

    rule variables:
        output: "variables.txt"
        threads: 2
        shell:
            "echo $OMP_NUM_THREADS $MKL_NUM_THREADS $OPENBLAS_NUM_THREADS $NUMEXPR_NUM_THREADS"
            " $GOTO_NUM_THREADS $VECLIB_MAXIMUM_THREADS > {output}; "
            "[ -d \"$TMPDIR\" ]; [ {resources.tmpdir} = \"$TMPDIR\" ]; "
            "[ -f Snakefile ]; [ -f config.yaml ]"

    rule made:
        output: "made/deep/er/file"
        shell: "[ -d made/deep/er ]; touch {output}; chmod 755 {output}"

    rule here:
        input: "sh.txt"
        output: "here.txt"
        shell: "echo here $MANTIK_HERE > {output}"
"""
OTHER = r"""
    rule word:
        output: "word.txt"
        params: word=config["word"]
        shell: "echo {params.word} {config[word]} > {output}"
"""


def test_rules_modules_values_and_environment(both: Project) -> None:
    both.write("Snakefile", SNAKEFILE)
    both.write("config.yaml", "word: outer\n")
    both.write("other/Snakefile", OTHER)
    both.write("in.txt", "some input\n")
    both.extra["MANTIK_HERE"] = "of this machine"
    twin = both.twin()
    twin.run(local=True).ok()

    ran = both.run("--resources", "mem_mb=100000").ok()

    (both.directory / "suffixes.txt").unlink(missing_ok=True)
    (twin.directory / "suffixes.txt").unlink()
    assert tree(both.directory) == tree(twin.directory), ran.output
    assert both.read("sub/word.txt") == "inner inner\n"
    assert both.read("sh.txt") == "none\n"
    assert {record.rule for record in both.tries} == {
        "cells", "sh", "variables", "made", "other_word"
    }  # fmt: skip
    assert "Nothing to be done" in both.run().ok().output
