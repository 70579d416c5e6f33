rule more:
    input: "common.txt"
    output: "more.txt"
    run:
        shell("cat {input} > {output}; echo {config[name]} >> {output}")
