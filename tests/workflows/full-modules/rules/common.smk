def greeting(name):
    return f"hello {name}"


rule common:
    output: "common.txt"
    params: source=workflow.source_path("../.hidden/data.txt")
    run:
        with open(output[0], "w") as file, open(params.source) as source:
            print(greeting(config["name"]), source.read(), file=file)
