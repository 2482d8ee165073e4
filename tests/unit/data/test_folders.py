"""Folders and tables as people have them: each loads as it is meant, or one line says why not."""

import io
import itertools
import re
import tarfile

import numpy as np
import pytest
from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.config.image_settings import ImageConfig
from dbsl.data.tables import open_labelled
from tests.helpers import make_table

# A case: its name | its files | images of each class and split | what is said of what is left out.
# A line that begins with blanks goes on with the one before. In names, {a,b}/{1,2} are four and ~
# is a blank. Behind = stands what a file has, ; for the end of a line. Others are images, tables.
LOADS = r"""
class folders | {cat,dog}/{0,1}.jpg | cat 2 dog 2 |
captions | {cat,dog}/{0,1}.jpg {cat,dog}/{0,1}.txt= | cat 2 dog 2 | 4 .txt files, 2 in cat
outlines | {cat,dog}/{0,1}.jpg dog/{0,1}.xml= | cat 2 dog 2 | 2 .xml files, 2 in dog
descriptions | {cat,dog}/{0,1}.jpg cat/{0,1}.json={} | cat 2 dog 2 | 2 .json files, 2 in cat
a list of captions | {cat,dog}/0.jpg metadata.csv=file_name,text;cat/0.jpg,a | cat 1 dog 1 |
tables beside | {cat,dog}/0.jpg {a,b}.csv=id;1 README.md= | cat 1 dog 1 | 2 .csv files.* 1 .md files
parquet beside | {cat,dog}/0.jpg features.parquet= | cat 1 dog 1 | 1 .parquet files, 1 in the top
features | {cat,dog}/{0,1}.jpg cat/x.{h5,pdf}= | cat 2 dog 2 | 1 .h5 files, 1 in cat
an archive beside | {cat,dog}/0.jpg cats.zip= | cat 1 dog 1 | 1 .zip files, 1 in the top folder
what systems leave | {cat,dog}/0.jpg {__MACOSX/,}cat/._0.jpg .git/x.png cat/@eaDir/0.jpg/t.jpg
    | cat 1 dog 1 |
underscores | {__a,_b}/{0,__1}.jpg | __a 2 _b 2 |
blanks and emoji | {my~cat,dög~🐕}/{0~1,2}.jpg | dög 🐕 2 my cat 2 |
brackets | x~[1]/{a[1],b*}/{0,1}.jpg | a[1] 2 b* 2 |
numbers | {10,9,2}/{0,1}.jpg | 10 2 2 2 9 2 |
words for nothing | {NA,null,True,1e5}/0.png | 1e5 1 NA 1 True 1 null 1 |
folders around | photos/all/{cat,dog}/{0,1}.jpg | cat 2 dog 2 |
deeper classes | {bird,fish}/{other,big}/0.jpg | bird/big 1 bird/other 1 fish/big 1 fish/other 1 |
a class in a class | {bird,cat}/0.jpg bird/owl/{1,2}.jpg | bird 1 bird/owl 2 cat 1 |
a loose image | {cat,dog}/0.jpg x.jpg | cat 1 dog 1 | 1 images without a class, 1 in the top folder
a class without images | {cat,dog}/0.jpg emu/.keep= | cat 1 dog 1 | 1 empty folders, 1 in emu
kinds of images | {cat,dog}/0.{JPG,jpeg,jfif,png,bmp,gif,tif,webp,jp2,avif,ppm,tga,ico}
    | cat 13 dog 13 |
phones | {cat,dog}/0.jpg cat/{a,b}.HEIC dog/a.heif
    | cat 1 dog 1 | 2 .heic files \(pip install pillow-heif reads them\), 2 in cat; 1 .heif
cameras | {cat,dog}/0.jpg dog/{a,b}.cr2 | cat 1 dog 1 | 2 .cr2 files, 2 in dog
without endings | {cat,dog}/{a,b} dog/LICENSE=no~image | cat 2 dog 2 | 1 files without an ending
splits | {train,test}/{cat,dog}/0.jpg | cat 1 dog 1; test: cat 1 dog 1 |
capitals | {Train,TEST}/{cat,dog}/0.jpg | cat 1 dog 1; test: cat 1 dog 1 |
years | data/{train2017,val2017}/{cat,dog}/0.jpg | cat 1 dog 1; validation: cat 1 dog 1 |
brackets in splits | d[2]/{train~[1],test~(2)}/{cat,dog}/0.jpg | cat 1 dog 1; test: cat 1 dog 1 |
sets | {TrainSet,testset}/{cat,dog}/0.jpg | cat 1 dog 1; test: cat 1 dog 1 |
words in one | {TrainImages,TestImages}/{cat,dog}/0.jpg | cat 1 dog 1; test: cat 1 dog 1 |
folds | {fold1,fold2}/{cat,dog}/0.jpg | cat 2 dog 2 |
a blank behind a class | train/{cat~,dog}/0.jpg val/{cat,dog}/0.jpg
    | cat 1 dog 1; validation: cat 1 dog 1 |
two for training | {train1,train2,test}/{cat,dog}/0.jpg | cat 2 dog 2; test: cat 1 dog 1 |
validation and test | {train,test,valid}/{cat,dog}/0.jpg valid/cat/1.jpg
    | cat 1 dog 1; validation: cat 2 dog 1 |
evaluation | training/{cat,dog}/0.jpg eval/cat/0.jpg | cat 1 dog 1; test: cat 1 |
twice the split | train/train/{cat,dog}/0.jpg test/test/cat/0.jpg pred/pred/{0,1}.jpg
    | cat 1 dog 1; test: cat 1 | 2 images in no split, 2 in pred/pred
images below splits | {train,test}/images/{cat,dog}/0.jpg | cat 1 dog 1; test: cat 1 dog 1 |
splits below classes | {cat,dog}/{train,test}/0.jpg | cat 1 dog 1; test: cat 1 dog 1 |
splits in the middle | {real,fake}/{train,test}/{cat,dog}/0.jpg real/train/cat/1.jpg real/x.jpg
    | fake/cat 1 fake/dog 1 real/cat 2 real/dog 1; test: fake/cat 1 fake/dog 1 real/cat 1 real/dog 1
    | 1 images in no split, 1 in real
an unlabelled test | train/{cat,dog}/{0,1}.jpg test/{0,1}.jpg
    | cat 2 dog 2 | 2 images without a class, 2 in test
an unlabelled test beside others | {train,val}/{cat,dog}/0.jpg test/{0,1}.jpg
    | cat 1 dog 1; validation: cat 1 dog 1 | 2 images without a class, 2 in test
an unknown test | train/{cat,dog}/{0,1}.jpg test/unknown/{0,1}.jpg
    | cat 2 dog 2 | 2 images of no training class, 2 in test/unknown
a test of a phone | train/{cat,dog}/0.jpg test/cat/{0,1}.heic | cat 1 dog 1 | 2 .heic files
more in the test | train/{cat,dog}/0.jpg test/{dog,emu}/0.jpg | cat 1 dog 1; test: dog 1 emu 1
    | classes of .* without a training image: emu
beside splits | {train,test}/{cat,dog}/0.jpg more/emu/{0,1}.jpg
    | cat 1 dog 1; test: cat 1 dog 1 | 2 images in no split, 2 in more/emu
a class named as a split | {train,bus}/{0,1}.jpg | bus 2 train 2 |
classes named as splits | {train,test}/{train,test}/0.jpg | test 1 train 1; test: test 1 train 1 |
words in classes | {a,test-b}/{0,test_1,train_2}.jpg | a 3 test-b 3 |
a word among classes | {cars,test-tubes}/{a,b}/0.jpg
    | cars/a 1 cars/b 1 test-tubes/a 1 test-tubes/b 1 |
one split | test/{cat,dog}/{0,1}.jpg | cat 2 dog 2 |
a list | {0,1}.jpg metadata.csv=file_name,label;0.jpg,b;1.jpg,a | a 1 b 1 |
a list a split | {train,test}/{0,1}.jpg {train,test}/metadata.csv=file_name,label;0.jpg,a;1.jpg,b
    | a 1 b 1; test: a 1 b 1 |
a list at the top | train/{a,b}/0.jpg test/0.jpg
    metadata.csv=file_name,label;train/a/0.jpg,x;./test/0.jpg,y;train\b\0.jpg,y
    | x 1 y 1; test: y 1 |
a list above its images | images/{0,1}.jpg
    metadata.csv=file_name,label;images/0.jpg,a;images/1.jpg,b
    | a 1 b 1 |
a column of splits | {0,1,2,3}.jpg
    metadata.csv=file_name,label,split;0.jpg,a,train;1.jpg,b,Train;2.jpg,a,TEST;3.jpg,b,extra
    | a 1 b 1; test: a 1 | 1 images in no split
blank labels | {0,1,2,3}.jpg metadata.csv=file_name,label;0.jpg,a;1.jpg,b;2.jpg,;3.jpg,~
    | a 1 b 1 | 2 images without a class, 2 in the top folder
blanks in a list | {0,1,2}.jpg metadata.csv=~file_name~,~label;0.jpg,~a;~1.jpg,b~;2.jpg,a
    | a 2 b 1 |
labels as written | {0,1,2,3}.jpg
    metadata.csv=file_name,label;0.jpg,001;1.jpg,NA;2.jpg,null;3.jpg,1.0
    | 001 1 1.0 1 NA 1 null 1 |
numbers in order | {0,1,2}.jpg metadata.csv=file_name,label;0.jpg,10;1.jpg,9;2.jpg,-1
    | -1 1 9 1 10 1 |
semicolons | {0,1}.jpg metadata.csv=file_name\u003blabel;0.jpg\u003ba;1.jpg\u003bb | a 1 b 1 |
of Windows | {0,1}.jpg metadata.csv=\ufefffile_name,label\u000d;0.jpg,ä\u000d;1.jpg,b | b 1 ä 1 |
quotes | {0,1}.jpg metadata.csv=file_name,label;"0.jpg","a,~b";1.jpg,c | a, b 1 c 1 |
lines of JSON | {0,1,2}.png
    metadata.jsonl={"file_name":"0.png","label":9};;{"file_name":"1.png","label":10}
    | 9 1 10 1 | 1 images without a row
two lists, and null | {0,1,2}.png x/metadata.jsonl={"file_name":"../2.png","label":null}
    metadata.csv=file_name,label;0.png,a;1.png,b
    | a 1 b 1 | 1 images without a class
missing files | {0,1}.jpg metadata.csv=file_name,label;0.jpg,b;1.jpg,a;2.jpg,a
    | a 1 b 1 | 1 rows that name no image
repeated rows | {0,1}.jpg metadata.csv=file_name,label;0.jpg,b;1.jpg,a;1.jpg,a
    | a 1 b 1 | 1 rows that repeat another
another column | {0,1}.jpg metadata.csv=file_name,target;0.jpg,b;1.jpg,a | a 1 b 1 |
a list of one split | train/{cat,dog}/0.jpg val/{0,1}.jpg
    val/metadata.csv=file_name,label;0.jpg,dog;1.jpg,cat
    | cat 1 dog 1; validation: cat 1 dog 1 |
a list of another ending | {0,1}.jpg
    Metadata.TSV=file_name\u0009label;0.jpg\u0009a;1.jpg\u0009b
    | a 1 b 1 |
an ä in two parts | train/{bär,dog}/0.jpg val/{ba\u0308r,dog}/0.jpg
    | bär 1 dog 1; validation: bär 1 dog 1 |
a list and class folders | {cat,dog}/{0,1}.jpg metadata.csv=file_name,label;cat/0.jpg,x;dog/0.jpg,y
    | x 1 y 1 | 2 images without a row in a list, 1 in cat
a card | {one,two}/{cat,dog}/0.jpg
    README.md=---;configs:~[{config_name:~default,~data_files:~[{split:~test,~path:~two/**}]}];---
    | cat 1 dog 1 |
parquet | cars.parquet cars_test.parquet | 0 2 1 1; test: 0 2 1 1 |
parquet of no split | {train,more}.parquet | 0 2 1 1 | 1 parquet files that no word .*: more.parquet
parquet in capitals | {Train,TEST}/0.parquet | 0 2 1 1; test: 0 2 1 1 |
parquet of two words | train/Test-0.parquet test/Train-0.parquet | 0 2 1 1; test: 0 2 1 1 |
parquet and brackets | x[1]/{train-0,train-1,val-0}.parquet | 0 4 1 2; validation: 0 2 1 1 |
parquet in a folder | test_run/{train-0,validation-0}.parquet | 0 2 1 1; validation: 0 2 1 1 |
parquet for training | {0,1}.parquet | 0 4 1 2 |
parquet of one split | valid.parquet logo.png | 0 2 1 1 |
"""
# Its name | its files | the message.
REFUSED = r"""
nothing | notes/.keep= | no two classes to train on \(no image; left out are 1 empty folders
phones alone | {cat,dog}/0.heic | no image; left out are 2 .heic files \(pip install pillow-heif
one class | cat/{0,1}.jpg | its images lie in cat
no classes | {0,1}.jpg | its images lie in its top folder\): put the images of each class into
one class to train on | train/cat/0.jpg test/{cat,dog}/0.jpg | images lie in test/cat and train/cat
flat splits | {train,test}/{0,1}.jpg | its images lie in test and train
a table of other names | {0,1}.jpg train.csv=id,label;0,1 | write a metadata.csv with the columns f
outlines alone | images/{train,val}/0.jpg labels/{train,val}/0.txt= | no two classes
nothing to train on | {test,val}/{cat,dog}/0.jpg | only folders for test and validation: name
archives | train.zip= | /train.zip is an archive: unpack it
an archive and a list | images.zip= labels.csv=a,b | images.zip is an archive: unpack it
two classes for an image | {0,1}.jpg metadata.csv=file_name,label;0.jpg,a;1.jpg,b;0.jpg,b
    | metadata.csv has 0.jpg as a and b: leave one of these rows in it
two splits for an image | {0,1}.jpg metadata.csv=file_name,label,split;0.jpg,a,train;0.jpg,a,test
    | 0.jpg as a,train and a,test
another encoding | {0,1}.jpg metadata.csv=file_name,label;0.jpg,\udce4
    | metadata.csv cannot be read .* save it as UTF-8
broken JSON | {0,1}.jpg metadata.jsonl={"file_name" | metadata.jsonl cannot be read
another first line | 0.jpg metadata.csv=filename,label;0.jpg,cat
    | names no image of its folder \(filename,label and 0.jpg,cat\): begin with the line
no column of labels | {0,1}.jpg metadata.csv=file_name,kind;0.jpg,a;1.jpg,b
    | no two classes .*; its lists have the columns file_name, kind\): put
no first line | 0.jpg metadata.csv=0.jpg,cat | no two classes
names without endings | 0.jpg metadata.csv=file_name,label;0,cat
    | no image .* \(file_name,label and 0,cat\): .* name a file in each row, such as 1.jpg,cat
fractions | {0,1}.jpg metadata.csv=file_name,label;0.jpg,0.5;1.jpg,2
    | fractions for labels, such as 0.5 in column 'label': make one whole number or text
several labels | 0.jpg metadata.jsonl={"file_name":"0.jpg","label":["a"]} | has lists or fractions
broken parquet | {train-0,train-1}.parquet train-2.parquet=PAR1 | /train-2.parquet is no parquet
a phone's class | cat/0.jpg dog/{0,1}.heic | images lie in cat; left out are 2 .heic files
an unrelated list | {cat,dog}/0.jpg metadata.csv=id,label;1,a | begin with the line file_name,label
tables without images | train.csv=a,label;1,2 | no image column .* its columns are 'a'
"""


def cases(text):
    lines = re.sub(r"\n +", " ", text).strip().splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [pytest.param(*more, id=name) for name, *more in cells]


def write(folder, files):
    """Write the files of a case."""
    Image.new("RGB", (8, 8)).save(image := io.BytesIO(), "png")
    make_table([Image.new("RGB", (8, 8))] * 3).to_parquet(table := io.BytesIO())
    for names, is_text, text in (file.partition("=") for file in files.split()):
        names, text = names.replace("~", " "), text.replace(";", "\n").replace("~", " ")
        names, text = (re.sub(r"\\u(.{4})", lambda c: chr(int(c[1], 16)), t) for t in (names, text))
        parts = re.split(r"\{(.*?)\}", names)
        choices = [part.split(",") if n % 2 else [part] for n, part in enumerate(parts)]
        for name in map("".join, itertools.product(*choices)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            own = table if name.endswith(".parquet") else image
            content = text.encode(errors="surrogateescape") if is_text else own.getvalue()
            (folder / name).write_bytes(content)
    return folder


def found_in(dataset, **settings):
    """Return the images of each class and split in words."""
    *splits, names = open_labelled(ImageConfig(str(dataset), **settings))
    texts = []
    for split in filter(None, splits):
        counts = zip(names, np.bincount(split.labels, minlength=len(names)), strict=True)
        title = "" if split is splits[0] else f"{split.name}: "
        texts.append(title + " ".join(f"{name} {count}" for name, count in counts if count))
    return "; ".join(texts)


@pytest.mark.parametrize(("files", "found", "said"), cases(LOADS))
def test_a_folder_loads_as_it_is_meant_and_what_is_left_out_is_said(
    tmp_path, caplog, files, found, said
):
    assert found_in(write(tmp_path / "set", files)) == found
    lines = " ".join(record.message for record in caplog.records)
    assert re.search(said, lines) if said else not lines


def test_a_tar_is_a_web_dataset_with_labels_or_must_be_unpacked(tmp_path):
    Image.new("RGB", (8, 8)).save(image := io.BytesIO(), "png")
    for folder, ending, names in (("web", "cls", "{}"), ("classes", "txt", "train/cat/{}")):
        (tmp_path / folder).mkdir()
        with tarfile.open(tmp_path / folder / "train-0.tar", "w") as tar:
            for number, end in itertools.product(range(3), (ending, "png")):
                content = image.getvalue() if end == "png" else str(number % 2).encode()
                info = tarfile.TarInfo(f"{names.format(number)}.{end}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    assert found_in(tmp_path / "web") == "0 2 1 1"
    with pytest.raises(SettingError, match=r"unpack a tar of class folders$"):
        found_in(tmp_path / "classes")


@pytest.mark.parametrize(("files", "message"), cases(REFUSED))
def test_a_folder_that_cannot_be_meant_is_refused_in_one_line(tmp_path, files, message):
    with pytest.raises(SettingError, match=message) as error:
        found_in(write(tmp_path / "set", files))
    assert "\n" not in str(error.value)
