rule one:
    output: "one.txt"
    shell: "echo {rule} > {output}"

rule two:
    output: "two.txt"
    shell: "echo {rule} > {output}"
