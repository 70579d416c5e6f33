say <- function(...) cat(..., sep = " | ", "\n")
