def text():
    return "helped"
