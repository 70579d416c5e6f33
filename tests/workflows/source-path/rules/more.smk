rule more:
    output: "made/more.txt"
    params: text=workflow.source_path("../words.txt"), beside=workflow.source_path("beside.txt")
    shell: "cat {params.text} {params.beside} > {output}"
