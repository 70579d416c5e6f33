os.environ["OF_INCLUDE"] = "included"
os.environ["OF_INCLUDE"] += " twice"

rule inc:
    output: "inc.txt"
    shell: "echo $OF_INCLUDE > {output}"
