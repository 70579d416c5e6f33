# The bundled rule: a job of it runs an entry point of an MLproject (docs/mlproject.md).
#
#     from snakemake_executor_plugin_mantik import mlproject
#     project = mlproject.load("churn")
#
#     module mantik:
#         snakefile: mlproject.RULE
#
#     use rule mlproject from mantik as train with:
#         input: data="data/train.csv"
#         output: model="models/{alpha}.pkl"
#         params: **project.entry_point("train", data="{input.data}", alpha="{wildcards.alpha}")


rule mlproject:
    shell:
        "{params.command}"
