"""Published end-to-end throughput, and the simulation of each setting.

LMDeploy's figures are of its A100 page, docs/en/benchmark/a100_fp16.md, version 0.2.0. ShareGPT's lengths themselves
cannot be shipped. Their means are what the figures imply: output tokens over requests is 232.7, and total less output
tokens over requests is 246.9. Both are taken as lognormal and cut off at 1,024, as the usual filter does.
"""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.measure.workload import Workload
from chairlift.simulate.catalogue import HARDWARE, MODELS
from chairlift.simulate.cost import roofline
from chairlift.simulate.lengths import draw_lengths
from chairlift.simulate.search import Setting, outcome_metrics
from chairlift.simulate.sizes import Deployment
from chairlift.simulate.workloads import synthetic_workload

SHAREGPT_PROMPT, SHAREGPT_OUTPUT = "lognormal:270:1.2:1024", "lognormal:232:1:1024"
ENGINE = "distserve"  # an engine in C++, as LMDeploy's is; its coefficients know nothing of the figures below
LAYERS = (
    "0.15 ms a layer, what DistServe's engine takes to launch OPT's unfused kernels, is two fifths of a step of 7B at "
    "batch 1; LMDeploy fuses most of them"
)
BURSTS = (
    "steps of fixed lengths agree (40 ms published, 41 simulated at batch 64; 0.40 s and 0.39 for a prompt of 2,048), "
    "so time is lost between them: prompts come in bursts, and some first tokens after 14.5 s"
)
FUSED = "the same, a smaller share of longer steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A figure that was published, with the setting that it was measured in.

    Attributes:
        name: for people.
        model, devices: what ran on how many A100-80G.
        batch: sequences in a batch.
        static: static batches of 128 prompt and 128 output tokens; else ShareGPT's lengths, continuously.
        output_throughput: output tokens a second.
        deviation: why the simulation deviates.
    """

    name: str
    model: str
    devices: int
    batch: int
    static: bool
    output_throughput: float
    deviation: str

    def simulate(self, count: int | None = None) -> float:
        """Output tokens a second, of ``count`` requests."""
        deployment = Deployment(
            model=MODELS[self.model],
            hardware=HARDWARE["a100-80g"],
            tensor_parallel_size=self.devices,
            max_model_len=min(4096, MODELS[self.model].max_position_embeddings),
            max_num_seqs=self.batch,
            max_num_batched_tokens=8192,
        )
        setting = Setting(
            deployment=deployment,
            cost=roofline(deployment, ENGINE),
            static_batch_size=self.batch if self.static else None,
        )
        return outcome_metrics(setting.run(self._workload(count)))["output_throughput"]

    def _workload(self, count: int | None) -> Workload:
        if self.static:
            return synthetic_workload(draw_lengths("128", "128", count or 4 * self.batch))
        return synthetic_workload(draw_lengths(SHAREGPT_PROMPT, SHAREGPT_OUTPUT, count or 3000))


PUBLISHED = (
    Published(
        name="Llama-2-13B, ShareGPT, batch 128",
        model="llama-2-13b",
        devices=1,
        batch=128,
        static=False,
        output_throughput=1850,
        deviation=FUSED,
    ),
    Published(
        name="Llama-2-7B, ShareGPT, batch 256",
        model="llama-2-7b",
        devices=1,
        batch=256,
        static=False,
        output_throughput=3387,
        deviation=FUSED,
    ),
    Published(
        name="Llama-2-70B on 4 devices, ShareGPT, batch 256",
        model="llama-2-70b",
        devices=4,
        batch=256,
        static=False,
        output_throughput=1683,
        deviation=BURSTS,
    ),
    *(
        Published(
            name=f"Llama-2-7B, 128/128, static batch {batch}",
            model="llama-2-7b",
            devices=1,
            batch=batch,
            static=True,
            output_throughput=throughput,
            deviation=deviation,
        )
        for batch, throughput, deviation in ((1, 102, LAYERS), (16, 1272, LAYERS), (32, 2125, FUSED), (64, 3024, FUSED))
    ),
)
