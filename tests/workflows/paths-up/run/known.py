with open("../data/x.csv") as file, open("../made/known.txt", "w") as made:
    made.write(file.read())
