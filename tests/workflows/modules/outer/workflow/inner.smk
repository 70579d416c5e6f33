rule word:
    output: "word.txt"
    input: workflow.source_path("text.txt")
    shell: "cat {input} > {output}; echo {config[word]} >> {output}"
