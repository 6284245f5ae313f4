/* Times of rows, and moves on the critical path; critical_path.py tells the idea.

   A row has the numbers of a stage in order. Pass i of number q starts at
   begins[q * m + i], at place places[q * m + i] of its row. */

#include "loops.h"

typedef struct {
    const Problem *of;
    int64_t *from;    /* stage s: rows[from[s]] to rows[from[s + 1] - 1] */
    int64_t *n;       /* passes that have a time, by number */
    int64_t *at;      /* and by stage */
    int64_t *awake;   /* a stack of stages; each is on it once */
    uint8_t *is_awake;
    double *now, *slack; /* end of the last pass; idle time that is left */
} Clock;

typedef struct {
    int32_t *rows;
    int64_t *places, *numbers; /* places of passes; by place, which of its number it is */
    double *begins;
    double span;
    int64_t longest; /* the stage that has the span */
} Plan;

enum { CYCLES = 2 };

/* A stage, and the first and the last place of the block in its row. */
typedef struct {
    int64_t stage, low, high;
} Block;

/* Marsaglia, "Xorshift RNGs", 2003; n up to 2**32. */
static uint64_t draw(uint64_t *state, uint64_t n) {
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    *state = x;
    return (x >> 32) * n >> 32;
}

static double first_begin(const Problem *of, const int32_t *rows, const int64_t *from,
                          const double *begins, int64_t s) {
    return begins[rows[from[s]] * of->n_microbatches];
}

static void wake(Clock *clock, int64_t *n_awake, int64_t s) {
    if (!clock->is_awake[s]) {
        clock->is_awake[s] = 1;
        clock->awake[(*n_awake)++] = s;
    }
}

/* Start every pass as early as its row allows. A stage runs until it lacks an input;
   the stage that computes that input wakes it. Passes that start before `since` keep
   their times: of rows that differ from timed ones only in passes from `since` on, no
   earlier pass changes. DONE, or GIVEN_UP: a deadlock, or a span beyond `most`. */
static int64_t time_rows(Clock *clock, const int32_t *rows, double *begins,
                         double since, double most, double *span, int64_t *longest,
                         int64_t *n_timed) {
    const Problem *of = clock->of;
    int64_t m = of->n_microbatches, p = of->n_stages, n_chunks = of->n_chunks;
    int64_t last = 2 * n_chunks - 1, n_awake = 0;
    for (int64_t s = 0; s < p; s++) {
        clock->at[s] = 0;
        clock->slack[s] = most - of->work[s] + of->tiny;
        clock->now[s] = 0.0;
    }
    for (int64_t q = 0; q < 3 * n_chunks; q++) {
        int64_t low = 0, high = since > 0.0 ? m : 0;
        if (q > last && of->joint[of->stage[q]]) high = 0;
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (begins[q * m + middle] < since) low = middle + 1;
            else high = middle;
        }
        int64_t s = of->stage[q];
        clock->n[q] = low;
        clock->at[s] += low;
        clock->slack[s] += (double)low * of->time[q];
    }
    for (int64_t s = 0; s < p; s++) {
        int64_t at = clock->at[s];
        clock->is_awake[s] = 0;
        if (at) {
            int64_t q = rows[clock->from[s] + at - 1];
            double now = begins[q * m + clock->n[q] - 1] + of->time[q];
            clock->now[s] = now;
            clock->slack[s] -= now - first_begin(of, rows, clock->from, begins, s);
        }
        wake(clock, &n_awake, s);
    }
    while (n_awake) {
        int64_t s = clock->awake[--n_awake];
        int64_t at = clock->at[s], end = clock->from[s + 1] - clock->from[s];
        const int32_t *row = rows + clock->from[s];
        double now = clock->now[s];
        clock->is_awake[s] = 0;
        for (; at < end; at++) {
            int64_t q = row[at], i = clock->n[q];
            if (0 < q && q <= last) {
                if (i >= clock->n[q - 1]) break;
                double arrival =
                    begins[(q - 1) * m + i] + of->time[q - 1] + of->delay[q - 1];
                if (arrival > now) {
                    if (at && (clock->slack[s] -= arrival - now) < 0) {
                        *n_timed += at - clock->at[s];
                        return GIVEN_UP;
                    }
                    now = arrival;
                }
            }
            begins[q * m + i] = now;
            clock->n[q] = i + 1;
            now += of->time[q];
            if (q < last) {
                int64_t target = of->stage[q + 1], place = clock->at[target];
                const int32_t *other = rows + clock->from[target];
                if (target != s && clock->n[q + 1] == i
                    && place < clock->from[target + 1] - clock->from[target]
                    && other[place] == q + 1) wake(clock, &n_awake, target);
            }
        }
        *n_timed += at - clock->at[s];
        clock->at[s] = at;
        clock->now[s] = now;
    }
    *span = -INFINITY;
    for (int64_t s = 0; s < p; s++) {
        if (clock->at[s] < clock->from[s + 1] - clock->from[s]) return GIVEN_UP;
        double one = clock->now[s] - first_begin(of, rows, clock->from, begins, s);
        if (one > *span) {
            *span = one;
            *longest = s;
        }
    }
    return DONE;
}

/* Find the places of a stage's passes. */
static void find_places(const Clock *clock, Plan *plan, int64_t *count, int64_t s) {
    int64_t m = clock->of->n_microbatches;
    for (int64_t q = 0; q < 3 * clock->of->n_chunks; q++) count[q] = 0;
    for (int64_t at = clock->from[s]; at < clock->from[s + 1]; at++) {
        int64_t q = plan->rows[at], i = count[q]++;
        plan->numbers[at] = i;
        plan->places[q * m + i] = at - clock->from[s];
    }
}

static double begin_at(const Clock *clock, const Plan *plan, int64_t s, int64_t place) {
    int64_t at = clock->from[s] + place;
    return plan->begins[plan->rows[at] * clock->of->n_microbatches + plan->numbers[at]];
}

/* Go back along the critical path from the end of the longest stage; each run of two or
   more passes of a stage without a wait is a block. */
static int64_t find_blocks(const Clock *clock, const Plan *plan, Block *blocks) {
    const Problem *of = clock->of;
    int64_t n_blocks = 0, s = plan->longest;
    int64_t high = clock->from[s + 1] - clock->from[s] - 1, at = high;
    double slack = 1e-9 * plan->span;
    for (;;) {
        const int32_t *row = plan->rows + clock->from[s];
        while (at && begin_at(clock, plan, s, at - 1) + of->time[row[at - 1]]
                         >= begin_at(clock, plan, s, at) - slack) at--;
        if (high > at) blocks[n_blocks++] = (Block){s, at, high};
        int64_t q = row[at];
        if (!(0 < q && q < 2 * of->n_chunks)) return n_blocks;
        int64_t i = plan->numbers[clock->from[s] + at];
        s = of->stage[q - 1];
        at = high = plan->places[(q - 1) * of->n_microbatches + i];
    }
}

static void move(int32_t *row, int64_t n, int64_t from, int64_t to) {
    int32_t q = row[from];
    if (to < 0) to = 0;
    if (to > n - 1) to = n - 1;
    if (from < to)
        memmove(row + from, row + from + 1, (size_t)(to - from) * sizeof(int32_t));
    else memmove(row + to + 1, row + to, (size_t)(from - to) * sizeof(int32_t));
    row[to] = q;
}

static void swap_again(int32_t *row, int64_t n, int64_t at, int64_t times) {
    int32_t one = row[at], two = row[at + 1];
    if (one == two) return;
    while (times > 0 && at < n - 1) {
        if (row[at] == one && row[at + 1] == two) {
            row[at] = two;
            row[at + 1] = one;
            times--;
            at++;
        }
        at++;
    }
}

/* Move a pass of a block, or swap two neighbours there and at their next meetings. */
static void change(int32_t *row, int64_t n, Block block, uint64_t *state) {
    static const int64_t PASSED[] = {0, 0, 1, 2, 4, 8}, STEPS[] = {-3, -2, -1, 1, 2, 3};
    int64_t low = block.low, high = block.high;
    uint64_t kind = draw(state, 100);
    int64_t at = low + (int64_t)draw(state, (uint64_t)(high - low));
    if (kind < 15) {
        int64_t times[] = {2, 4, 8, n};
        swap_again(row, n, at, times[draw(state, 4)]);
    } else if (kind < 45) {
        move(row, n, high, draw(state, 2) ? high - 1 : at);
    } else if (kind < 80) {
        move(row, n, at, high + PASSED[draw(state, 6)]);
    } else {
        if (draw(state, 2)) at++;
        move(row, n, at, at + STEPS[draw(state, 6)]);
    }
}

/* True if a row fits the memory, and each W comes after its B. */
static int is_valid(const Problem *of, const int32_t *row, int64_t n, int64_t s,
                    int64_t *count) {
    double memory = 0.0, limit = of->limits[s];
    int64_t n_chunks = of->n_chunks;
    for (int64_t q = 0; q < 3 * n_chunks; q++) count[q] = 0;
    for (int64_t at = 0; at < n; at++) {
        int64_t q = row[at];
        count[q]++;
        if (q >= 2 * n_chunks && count[q] > count[q - n_chunks]) return 0;
        if (memory + of->peak[q] > limit) return 0;
        memory += of->change[q];
    }
    return 1;
}

static int64_t climb(Clock *clock, Plan *plan, Plan *trial, Block *blocks,
                     int64_t *count, int32_t *best, double *best_span,
                     double cost, double passes, double threshold,
                     double *spent, uint64_t state) {
    const Problem *of = clock->of;
    int64_t p = of->n_stages, n_all = clock->from[p], n_timed = 0;
    size_t all = (size_t)n_all, times = (size_t)(3 * of->n_chunks * of->n_microbatches);
    if (time_rows(clock, plan->rows, plan->begins, 0.0, INFINITY, &plan->span,
                  &plan->longest, &n_timed) != DONE) return GIVEN_UP;
    *best_span = plan->span;
    if (*spent >= passes) return DONE;
    for (int64_t s = 0; s < p; s++) find_places(clock, plan, count, s);
    memcpy(trial->rows, plan->rows, all * sizeof(int32_t));
    double slack = 1e-9 * plan->span;
    int64_t n_blocks = find_blocks(clock, plan, blocks);
    double start = *spent;
    while (n_blocks && *spent < passes && *best_span > of->target) {
        Block block = blocks[draw(&state, (uint64_t)n_blocks)];
        int64_t s = block.stage, n = clock->from[s + 1] - clock->from[s], at = 0;
        int32_t *row = plan->rows + clock->from[s], *tried = trial->rows + clock->from[s];
        change(tried, n, block, &state);
        while (at < n && tried[at] == row[at]) at++;
        n_timed = n + 4 * of->n_chunks;
        double left = CYCLES * ((*spent - start) / (passes - start));
        left = 1 - (left - floor(left));
        double most = *best_span * (1 + threshold * left * left) + slack;
        if (at < n && is_valid(of, tried, n, s, count)) {
            double since = begin_at(clock, plan, s, at);
            memcpy(trial->begins, plan->begins, times * sizeof(double));
            if (time_rows(clock, trial->rows, trial->begins, since, most,
                          &trial->span, &trial->longest, &n_timed) == DONE
                && trial->span <= most) {
                double *begins = plan->begins;
                plan->begins = trial->begins;
                trial->begins = begins;
                plan->span = trial->span;
                plan->longest = trial->longest;
                memcpy(row, tried, (size_t)n * sizeof(int32_t));
                find_places(clock, plan, count, s);
                n_blocks = find_blocks(clock, plan, blocks);
                if (plan->span < *best_span - slack) {
                    *best_span = plan->span;
                    memcpy(best, plan->rows, all * sizeof(int32_t));
                }
            }
        }
        memcpy(tried, row, (size_t)n * sizeof(int32_t));
        *spent += cost * (double)n_timed;
    }
    return DONE;
}

/* Improve rows in place, stage by stage; n_row is their length. */
ZBPP_API int64_t zbpp_improve(const Problem *of, int32_t *rows, const int64_t *n_row,
                              double cost, double passes, double threshold,
                              uint64_t seed, double *spent, double *span) {
    int64_t p = of->n_stages, n_numbers = 3 * of->n_chunks, n_all = 0;
    int64_t n_times = n_numbers * of->n_microbatches, result = NO_MEMORY;
    for (int64_t s = 0; s < p; s++) n_all += n_row[s];
    int64_t *whole =
        calloc((size_t)(3 * p + 1 + 2 * n_numbers + n_times + n_all), sizeof(int64_t));
    double *floats = calloc((size_t)(2 * p + 2 * n_times), sizeof(double));
    int32_t *trials = calloc((size_t)(2 * n_all), sizeof(int32_t));
    uint8_t *is_awake = calloc((size_t)p, 1);
    Block *blocks = calloc((size_t)n_all, sizeof(Block));
    if (!whole || !floats || !trials || !is_awake || !blocks) goto end;
    Clock clock = {.of = of, .is_awake = is_awake};
    clock.from = whole;
    clock.n = clock.from + p + 1;
    clock.at = clock.n + n_numbers;
    clock.awake = clock.at + p;
    int64_t *count = clock.awake + p;
    clock.now = floats;
    clock.slack = floats + p;
    for (int64_t s = 0; s < p; s++) clock.from[s + 1] = clock.from[s] + n_row[s];
    Plan plan = {.rows = trials, .begins = floats + 2 * p};
    Plan trial = {.rows = trials + n_all, .begins = plan.begins + n_times};
    plan.places = count + n_numbers;
    plan.numbers = plan.places + n_times;
    memcpy(plan.rows, rows, (size_t)n_all * sizeof(int32_t));
    result = climb(&clock, &plan, &trial, blocks, count, rows, span, cost, passes,
                   threshold, spent, 0x9E3779B97F4A7C15u * (2 * seed + 1));
end:
    free(whole);
    free(floats);
    free(trials);
    free(is_awake);
    free(blocks);
    return result;
}
