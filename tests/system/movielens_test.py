"""The files of the MovieLens-1M benchmarks, from an archive of the official form."""

import csv
import gzip
import random
import zipfile

import pytest

from benchmarks.quality import movielens
from jaxrank.errors import InputError

USERS = ["1::F::1::10::48067", "2::M::56::16::02139", "3::M::25::15::55117-1234"]
MOVIES = [
    "1::Toy Story (1995)::Animation|Children's|Comedy",
    "2::M\xe9nage (Tenue de soir\xe9e) (1986)::Drama",
    "3::Two, or (2001) (1968)::Sci-Fi|Thriller",
]
STARS = {(1, 1): 5, (1, 2): 3, (1, 3): 1, (2, 1): 4, (2, 2): 2, (3, 1): 5, (3, 2): 4, (3, 3): 3}


def archive(path, stars, users=USERS, movies=MOVIES):
    ratings = [f"{user}::{movie}::{n}::978300760" for (user, movie), n in stars]
    with zipfile.ZipFile(path, "w") as file:
        for name, lines in (("ratings", ratings), ("users", users), ("movies", movies)):
            file.writestr(f"ml-1m/{name}.dat", ("\n".join(lines) + "\n").encode("latin-1"))
    return path


def written(archive, output, monkeypatch):
    monkeypatch.setattr("sys.argv", ["", f"--archive={archive}", f"--output={output}"])
    movielens.main()
    rows = {}
    for path in output.iterdir():
        with gzip.open(path, "rt", newline="") as file:
            rows[path.name] = list(csv.DictReader(file))
    return rows


def test_every_rating_is_in_one_split_with_its_user_and_movie(tmp_path, monkeypatch):
    ratings = list(STARS.items())
    rows = written(archive(tmp_path / "a.zip", ratings), tmp_path / "a", monkeypatch)
    ctr = [row for split in movielens.SPLITS for row in rows[f"ctr_{split}.csv.gz"]]
    mtl = [row for split in movielens.SPLITS for row in rows[f"mtl_{split}.csv.gz"]]
    assert {(int(r["user"]), int(r["movie"])): (r["like"], r["love"]) for r in mtl} == {
        pair: (str(int(n >= 4)), str(int(n == 5))) for pair, n in ratings
    }
    assert {(int(r["user"]), int(r["movie"])): r["label"] for r in ctr} == {
        pair: str(int(n > 3)) for pair, n in ratings if n != 3
    }
    assert len(mtl) == len(ratings)
    assert [len(rows[f"mtl_{split}.csv.gz"]) for split in movielens.SPLITS] == [6, 1, 1]
    row = next(r for r in mtl if (r["user"], r["movie"]) == ("2", "2"))
    assert row["zip"] == "02139"
    assert (row["gender"], row["age"], row["occupation"]) == ("M", "56", "16")
    assert (row["year"], row["genres"]) == ("1986", "Drama")
    assert {r["year"] for r in mtl if r["movie"] == "3"} == {"1968"}
    assert {r["genres"] for r in mtl if r["movie"] == "1"} == {"Animation|Children's|Comedy"}

    random.Random(0).shuffle(ratings)
    again = written(archive(tmp_path / "b.zip", ratings), tmp_path / "b", monkeypatch)
    assert again == rows


@pytest.mark.parametrize(
    ("users", "movies", "message"),
    [
        (USERS[:2], MOVIES, "found 8 ratings, 5 with both"),
        (USERS, [*MOVIES[:2], "3::Two"], r"movies.dat, line 3: must have 3 fields .* found 2"),
    ],
)
def test_invalid_archives_are_rejected(tmp_path, users, movies, message):
    path = archive(tmp_path / "a.zip", STARS.items(), users, movies)
    with pytest.raises(InputError, match=message):
        movielens.read_archive(path)
