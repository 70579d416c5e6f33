with open("../data/x.csv") as file, open("../made/known-script.txt", "w") as made:
    made.write(file.read())
