"""A log of films that people know, made up: who watched what is drawn, titles and years are real.

Each viewer likes two genres and tends to go on with a film of the same years, so a small model
learns something that can be seen.
"""

import csv
import random
from pathlib import Path

FILMS = """
Toy Story (1995);Animation|Children|Comedy
A Bug's Life (1998);Animation|Children|Comedy
The Lion King (1994);Animation|Children|Musical
Aladdin (1992);Animation|Children|Musical
Beauty and the Beast (1991);Animation|Children|Musical
Mulan (1998);Animation|Children|Musical
Hercules (1997);Animation|Children|Musical
The Little Mermaid (1989);Animation|Children|Musical
Pinocchio (1940);Animation|Children
Fantasia (1940);Animation|Musical
Dumbo (1941);Animation|Children
Bambi (1942);Animation|Children
Cinderella (1950);Animation|Children|Musical
The Jungle Book (1967);Animation|Children|Comedy
Tarzan (1999);Animation|Children
Chicken Run (2000);Animation|Children|Comedy
Antz (1998);Animation|Children|Comedy
The Iron Giant (1999);Animation|Children
Star Wars (1977);Adventure|Sci-Fi
The Empire Strikes Back (1980);Adventure|Sci-Fi
Return of the Jedi (1983);Adventure|Sci-Fi
The Phantom Menace (1999);Adventure|Sci-Fi
Blade Runner (1982);Sci-Fi|Thriller
Alien (1979);Horror|Sci-Fi
Aliens (1986);Action|Sci-Fi
The Terminator (1984);Action|Sci-Fi
Terminator 2 (1991);Action|Sci-Fi
The Matrix (1999);Action|Sci-Fi
Back to the Future (1985);Comedy|Sci-Fi
Back to the Future Part II (1989);Comedy|Sci-Fi
2001: A Space Odyssey (1968);Sci-Fi
Close Encounters of the Third Kind (1977);Drama|Sci-Fi
E.T. (1982);Children|Sci-Fi
Jurassic Park (1993);Action|Sci-Fi
Men in Black (1997);Comedy|Sci-Fi
Contact (1997);Drama|Sci-Fi
Gattaca (1997);Drama|Sci-Fi
Metropolis (1927);Sci-Fi
Planet of the Apes (1968);Action|Sci-Fi
Casablanca (1942);Drama|Romance
Gone with the Wind (1939);Drama|Romance
Roman Holiday (1953);Comedy|Romance
Breakfast at Tiffany's (1961);Drama|Romance
Sabrina (1954);Comedy|Romance
Annie Hall (1977);Comedy|Romance
Manhattan (1979);Comedy|Romance
When Harry Met Sally (1989);Comedy|Romance
Sleepless in Seattle (1993);Comedy|Romance
You've Got Mail (1998);Comedy|Romance
Pretty Woman (1990);Comedy|Romance
Notting Hill (1999);Comedy|Romance
Shakespeare in Love (1998);Comedy|Romance
Sense and Sensibility (1995);Drama|Romance
Emma (1996);Comedy|Romance
Titanic (1997);Drama|Romance
The English Patient (1996);Drama|Romance
City Lights (1931);Comedy|Romance
It Happened One Night (1934);Comedy|Romance
Four Weddings and a Funeral (1994);Comedy|Romance
Psycho (1960);Horror|Thriller
Vertigo (1958);Mystery|Thriller
Rear Window (1954);Mystery|Thriller
North by Northwest (1959);Thriller
The Birds (1963);Horror
The Shining (1980);Horror
Halloween (1978);Horror
Scream (1996);Horror|Thriller
The Exorcist (1973);Horror
Poltergeist (1982);Horror
Jaws (1975);Action|Horror
The Silence of the Lambs (1991);Thriller
Seven (1995);Thriller
The Usual Suspects (1995);Thriller
L.A. Confidential (1997);Mystery|Thriller
Chinatown (1974);Mystery|Thriller
The Maltese Falcon (1941);Mystery
The Big Sleep (1946);Mystery
The Third Man (1949);Mystery|Thriller
Dial M for Murder (1954);Mystery|Thriller
The 39 Steps (1935);Thriller
Nosferatu (1922);Horror
Frankenstein (1931);Horror
Dracula (1931);Horror
The Godfather (1972);Crime|Drama
The Godfather Part II (1974);Crime|Drama
Goodfellas (1990);Crime|Drama
Pulp Fiction (1994);Crime|Drama
Fargo (1996);Crime|Thriller
Reservoir Dogs (1992);Crime|Thriller
Heat (1995);Crime|Thriller
Taxi Driver (1976);Drama|Thriller
Raging Bull (1980);Drama
Citizen Kane (1941);Drama
Schindler's List (1993);Drama|War
Saving Private Ryan (1998);Drama|War
Apocalypse Now (1979);Drama|War
Platoon (1986);Drama|War
The Bridge on the River Kwai (1957);Drama|War
Lawrence of Arabia (1962);Adventure|War
Das Boot (1981);Drama|War
Full Metal Jacket (1987);Drama|War
Paths of Glory (1957);Drama|War
Gladiator (2000);Action|Drama
Braveheart (1995);Action|Drama
Spartacus (1960);Drama
Ben-Hur (1959);Adventure|Drama
Raiders of the Lost Ark (1981);Action|Adventure
Temple of Doom (1984);Action|Adventure
The Last Crusade (1989);Action|Adventure
Goldfinger (1964);Action
Dr. No (1962);Action
GoldenEye (1995);Action
Die Hard (1988);Action|Thriller
Speed (1994);Action|Thriller
Airplane! (1980);Comedy
The Blues Brothers (1980);Comedy|Musical
Ghostbusters (1984);Comedy
Groundhog Day (1993);Comedy
Some Like It Hot (1959);Comedy
The General (1927);Comedy
Modern Times (1936);Comedy
The Apartment (1960);Comedy|Drama
Singin' in the Rain (1952);Musical|Romance
The Sound of Music (1965);Musical
West Side Story (1961);Musical|Romance
The Wizard of Oz (1939);Children|Musical
Mary Poppins (1964);Children|Musical
My Fair Lady (1964);Musical|Romance
Grease (1978);Musical|Romance
Cabaret (1972);Drama|Musical
""".strip().splitlines()


def write_films(directory: Path, viewers: int = 260, seed: int = 3) -> tuple[Path, Path]:
    """Write events.csv (viewer, film, when) and films.csv (film, title, genres)."""
    draw = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    events, films = directory / "events.csv", directory / "films.csv"
    genres = [set(line.split(";")[1].split("|")) for line in FILMS]
    years = [int(line.split("(")[1][:4]) for line in FILMS]
    with films.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["film", "title", "genres"])
        rows.writerows([number + 1, *line.split(";")] for number, line in enumerate(FILMS))
    known = sorted(set().union(*genres))
    with events.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["viewer", "film", "when"])
        for viewer in range(1, viewers + 1):
            likes, now = set(draw.sample(known, 2)), 946_684_800 + draw.randrange(20_000_000)
            left, last = set(range(len(FILMS))), draw.randrange(len(FILMS))
            for _ in range(draw.randint(12, 60)):
                weights = {
                    film: (8.0 if genres[film] & likes else 0.3)
                    / (1 + abs(years[film] - years[last]) / 4)
                    for film in sorted(left)
                }
                last = draw.choices(list(weights), list(weights.values()))[0]
                left.discard(last)
                now += draw.choice([60, 3_600, 86_400, 604_800])
                rows.writerow([viewer, last + 1, now])
    return events, films
