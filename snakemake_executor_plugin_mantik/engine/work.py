"""Define what all parts of the engine share that work at one site."""

from dataclasses import dataclass

from ..sites.base import Site, SiteFacts
from .fetch import Fetcher
from .observer import Observer
from .place import Place, Places
from .plan import Planner
from .site_retry import SiteRetry
from .undeclared import UndeclaredFiles


@dataclass(frozen=True)
class SiteWork:
    """What the parts share: the site and its facts, its place, those of all sites, and so on."""

    site: Site
    facts: SiteFacts
    planner: Planner
    place: Place
    places: Places
    observer: Observer
    retry: SiteRetry
    fetcher: Fetcher
    undeclared: UndeclaredFiles


class Worker:
    """Base class of the parts. Call all methods from the event loop's thread."""

    def __init__(self, work: SiteWork) -> None:
        workflow = work.places.workflow
        self._site = work.site
        self._facts = work.facts
        self._planner = work.planner
        self._settings = work.planner.config.site
        self._place = work.place
        self._local = work.places.local
        self._observer = work.observer
        self._retry = work.retry
        self._fetcher = work.fetcher
        self._journal = workflow.journal
        self._workdir = workflow.workdir
        self._logs = workflow.logs
        self._notify = workflow.notify
        self._give_up = workflow.give_up
