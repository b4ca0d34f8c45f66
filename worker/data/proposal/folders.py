"""The options for a folder of images, whose folders are the classes."""

from collections.abc import Sequence
from pathlib import Path

from tessera.shared.near_names import composed
from tessera.worker.data.groups import PATIENT, PERSON_IN_PATH, in_paths, person_of
from tessera.worker.data.kinds.images import dicom_reader, is_dicom_image
from tessera.worker.data.load_report import LoadReport, by_suffix, counted
from tessera.worker.data.proposal.class_names import add_class_names
from tessera.worker.data.proposal.model_inputs import add_pixels
from tessera.worker.data.proposal.options import SAMPLE, Proposal
from tessera.worker.data.readers.data_folders import foreign
from tessera.worker.data.readers.pictures import GROUP, SUFFIXES, Pictures
from tessera.worker.data.readers.table_files import SPLITS
from tessera.worker.data.readers.tables import READERS
from tessera.worker.errors import DataError


def add_folder(proposal: Proposal, folder: Path, found: Sequence[Path], processor: str | None) -> None:
    """Add the options for a folder, in which these files were found. Raises DataError if a person has to decide."""
    images = sorted(file for file in found if file.suffix.lower() in SUFFIXES)
    files = images or sorted(file for file in found if is_dicom_image(folder / file))
    if not files:
        kinds = counted(by_suffix(found))
        formats = f"{', '.join(sorted(SUFFIXES))}; {', '.join(READERS)}"
        raise DataError(
            f"{folder} contains no images or tables ({formats}; DICOM), but {kinds}: convert images to PNG, and save "
            "spreadsheets as CSV (UTF-8)"
        )
    tops = sorted({file.parts[0] for file in files if len(file.parts) > 1})
    if splits := [top for top in tops if top.lower() in SPLITS]:
        raise DataError(
            f"{folder} has folders for splits ({', '.join(splits)}): run the command with {folder / splits[0]}. To "
            'measure on another, run it again with another --name, and replace held_out by use = "evaluate"'
        )
    if loose := [file for file in files if len(file.parts) == 1]:
        raise DataError(
            f"{folder / loose[0]} is not in the folder of a class: move each image into one, or write a CSV file "
            "with the columns image and label, and run the command with it"
        )
    below: dict[str, set[str]] = {top: set() for top in tops}
    for top, name, *_ in (file.parts for file in files if len(file.parts) > 2):
        below[top].add(composed(name))
    classes = below[tops[0]]
    by_domain = len(tops) > 1 and len(classes) > 1 and all(below[top] == classes for top in tops)
    proposal.add("kind", "images", f"{len(files)} images in folders")
    proposal.add("folder", str(folder), "the folder that contains the folders of the classes")
    if by_domain:
        reason = f"each of {', '.join(tops[:8])} contains the same {len(classes)} folders, which are the classes"
        proposal.add("domain_folders", value=True, reason=reason)
    if not images:
        proposal.add("dicom", value=True, reason="the files are DICOM, which the extra `dicom` reads")
    # A class without images here has its number all the same; loading the data set then says what to do about it.
    own = {each.name for each in folder.iterdir() if each.is_dir() and not foreign(each.name)}
    names, bare = (classes, []) if by_domain else (own, sorted(own.difference(tops)))
    source = "the folders' names" + (f", of which {', '.join(bare)} contain no images here" if bare else "")
    spelt: dict[str, set[str]] = {}
    for name in names:
        spelt.setdefault(composed(name), set()).add(name)
    add_class_names(proposal, spelt, source)
    some = files[:: -(-len(files) // SAMPLE)]
    _add_group(proposal, files, [folder / file for file in some])
    add_pixels(proposal, Pictures.of(folder, map(str, some)), processor)


def _add_group(proposal: Proposal, files: Sequence[Path], looked_at: Sequence[Path]) -> None:
    """Add the patient in the headers of DICOM files, of which some are looked at, or in all files' paths."""
    if "dicom" in proposal.options:
        reader = dicom_reader()
        patients = {reader(picture, str(picture)).info[GROUP] for picture in looked_at}
        if len(patients) > 1:
            proposal.add("group", PATIENT, "images with an equal value in their headers are held out together")
        elif not any(patients) or len(looked_at) > 1:
            proposal.warnings.append(
                f"{len(looked_at)} of the files have the same {PATIENT}, {min(patients)!r}: one patient's images may "
                "be trained on and held out. If an image's path names the patient, set group to a pattern for it."
            )
        return
    persons = [person_of(PERSON_IN_PATH, str(file)) for file in files]
    remedy = "Set group to a pattern that matches the patient in each image's path."
    if (found := in_paths(persons, remedy)) and all(persons):
        proposal.add("group", PERSON_IN_PATH, f"a pattern for the patient in an image's path: {found.what}")
    elif found:
        proposal.warn_of(LoadReport(ungrouped=[found]))
