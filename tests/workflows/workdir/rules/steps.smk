rule first:
    input: "data.txt"
    output: temp("made/first.txt")
    log: "logs/first.log"
    shell: "cat {input} > {output}; echo {rule} > {log}"

rule last:
    input: rules.first.output, rules.first.log, beside=workflow.source_path("beside.txt")
    output: "made/last.txt"
    shell: "cat {input[0]} {input.beside} > {output}; cat {rules.first.log} >> {output}"
