rule more:
    output: "more.txt"
    shell: "cat included/data.txt > {output}"
