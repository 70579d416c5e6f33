def mark(text):
    return f"<{text}>"
