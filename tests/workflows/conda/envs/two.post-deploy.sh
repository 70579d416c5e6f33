#!/usr/bin/env bash
set -e
mkdir -p "$CONDA_PREFIX/bin" "$CONDA_PREFIX/etc/conda/activate.d"
printf '#!/bin/bash\necho the tool of two\n' > "$CONDA_PREFIX/bin/tool"
chmod +x "$CONDA_PREFIX/bin/tool"
echo 'export ACTIVATED=two' > "$CONDA_PREFIX/etc/conda/activate.d/own.sh"
