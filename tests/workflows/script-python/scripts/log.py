import subprocess
import sys

logger.warning("a word on standard error")
subprocess.run(f"echo in the log{snakemake.log_fmt_shell()}", shell=True, check=True)
subprocess.run(f"echo more{snakemake.log_fmt_shell(append=True)}", shell=True, check=True)
with open(snakemake.output[0], "w") as out:
    print(snakemake.log_fmt_shell(stdout=False), sys.stdin.read(), file=out)
    print(snakemake.report_href("plots").child_path("a b.html").url_args(x="1 2"), file=out)
    print(open(snakemake.params.beside).readline(), file=out)
