"""Endpoints for studies: administrators manage them, their members read them."""

from typing import Annotated

from fastapi import APIRouter
from fastapi import Path as PathParam

from tessera.coordinator.api.dependencies import Admin, Key, Serving, Viewer
from tessera.coordinator.api.request_limits import BoundedRoute
from tessera.coordinator.operations import studies
from tessera.shared.api.admin import Study, StudyMember, StudySpec
from tessera.shared.schema import Page

router = APIRouter(prefix="/v1/studies", tags=["studies"], route_class=BoundedRoute)

StudyName = Annotated[str, PathParam(max_length=64)]


@router.post("", status_code=201, operation_id="createStudy")
def create_study(spec: StudySpec, serving: Serving, caller: Admin, key: Key = None) -> Study:
    """Create a study without members."""
    return studies.create_study(serving, caller, spec, key)


@router.get("", operation_id="listStudies")
def list_studies(serving: Serving, caller: Viewer) -> Page[Study]:
    """Return the caller's studies on one page, without their members."""
    return studies.list_studies(serving, caller)


@router.get("/{study}", operation_id="getStudy")
def get_study(study: StudyName, serving: Serving, caller: Viewer) -> Study:
    """Return a study with its sites; for an administrator with its tokens and people too."""
    return studies.get_study(serving, caller, study)


@router.post("/{study}/add", operation_id="addStudyMember")
def add_member(study: StudyName, member: StudyMember, serving: Serving, caller: Admin) -> Study:
    """Add a site, a token or a person to a study. It stays in its other studies."""
    return studies.add_member(serving, caller, study, member)


@router.post("/{study}/remove", operation_id="removeStudyMember")
def remove_member(study: StudyName, member: StudyMember, serving: Serving, caller: Admin) -> Study:
    """Remove a member from a study at once. A site's open tasks in its runs are cancelled."""
    return studies.remove_member(serving, caller, study, member)
