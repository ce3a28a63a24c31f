"""Why our figures differ from STAR's: what was looked into, in words for the report."""

LENGTHS = (
    "the table gives five figures of a distribution: knots between them were set so that mean and deviation come out, "
    "see the section on lengths"
)
ERRORS = "by construction: an exponential through the two figures that the text gives, drawn for 20,000 requests"
LARGE = (
    "the modelled cluster is far from its limits at the paper's rate: 0.2 req/s keeps about 25 requests of 13K tokens "
    "in flight, less than a quarter of the KV memory of six 80 GB devices, and its steps are shorter than the "
    "testbed's. So nothing saturates, and throughput is what arrives less what still runs at the end. The rows at the "
    "higher rate are the ones to compare"
)
LARGE_STRESS = (
    "ours: a rate at which the modelled cluster is as loaded as the paper's seems to be. Ratios between systems are "
    "what can be compared; throughput hardly depends on balance here, because a preempted request recomputes its KV in "
    "a second or two while decodes go on in the same steps"
)
SMALL = (
    "the unbalanced baseline is milder here: a preempted request is computed again alone, in chunks that share steps "
    "with the others' decodes, where the testbed's OOM makes all requests of the instance recompute. So its tail is "
    "shorter, and there is less for rescheduling to win"
)
SMALL_STRESS = "ours: the same at a rate at which preemptions are frequent without rescheduling"
TAIL = (
    "the tail shrinks where preemptions vanish; at lower rates the baseline has none, and even load lengthens the "
    "steps of the requests that were lucky before"
)
GOODPUT = (
    "not reproduced. Goodput counts requests, half of which are short, and placement by KV fill gives each new one the "
    "emptiest instance: where load is uneven, that is one with short steps (compare the P50 TPOT rows). Evening the "
    "load out brings all instances close to the same step time: below 25 ms all requests meet the limit, just above it "
    "all miss. In the testbed the baseline collapses before that (OOM), here it does not"
)
VARIANCE = (
    "that rescheduling lowers it several times is the paper's result too. Prediction does not lower it further: a "
    "migration takes 0.02 to 0.15 s, so a decision every second evens out the load of the moment as fast as it drifts, "
    "and weighing the future trades some of that balance for later. Where the memory is full (0.23 req/s) seeds differ "
    "by more than systems do, also with a decision every 60 s: see the rows at the end"
)
OOM = "The paper shows when OOM occurs (figure 12) and gives no numbers."
SCALE = (
    "the paper gives a plot: the variance stays low with rescheduling at every size. From 64 instances on prediction "
    "lowers it further: one migration a second, as Algorithm 1 has it, cannot even out everything there, so it matters "
    "how long the effect of a move lasts. On fewer instances the load of the moment is enough"
)
BINS = (
    "measured at the higher rate. Coarser lengths cost little here, because prediction itself wins little at a "
    "decision every second: the differences are within the intervals"
)
INTERVALS = (
    "measured at the higher rate, with differences within the intervals; asked at every step the predictor "
    "takes 1.4 ms of it (section 5.3). Staleness over 100 steps, two to three seconds, changes little of lengths of "
    "thousands of tokens"
)
ERAS = (
    "ours: geometric means over all rates of ratios on equal requests. For P99 TPOT less than 1 is better, for goodput "
    "more"
)
OURS = "no figure in the paper"
