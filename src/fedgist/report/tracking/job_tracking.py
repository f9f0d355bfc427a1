"""A listener that sends each round of many jobs to trackers, after its line is recorded."""

from __future__ import annotations

from fedgist.report.tracking.sending import LiveSender
from fedgist.report.tracking.tracker import TrackedRun, tracked_run
from fedgist.runs.finished.run_reader import read_run
from fedgist.studies.job import Event, Job


class JobTracking:
    """Sends the rounds of running jobs; jobs that were finished before are not sent."""

    def __init__(self, live: LiveSender) -> None:
        self.live = live
        self.runs: dict[str, TrackedRun] = {}  # by the name of the job

    def __call__(self, job: Job, event: Event) -> bool:
        """Send a round, or a run's end; return False, because no tracker stops a job."""
        if event.kind == "began":
            self.runs.pop(job.name, None)
        elif event.kind == "round" and event.line:
            lines = [event.line]
            if job.name not in self.runs:
                read = read_run(job.folder)  # a resumed job has earlier rounds
                lines = read.rounds or lines
                self.runs[job.name] = tracked_run(read.recipe, job.folder, lines[0])
            self.live.send(self.runs[job.name], lines)
        elif event.kind in {"done", "stopped", "failed"} and job.name in self.runs:
            self.live.end(self.runs.pop(job.name).id, finished=event.kind == "done")
        return False
