/* What the compiled loops share: a heap of events, and the problem as plain arrays.

   Each loop does what the Python function of the same name does, operation by
   operation, so that both give the same plans to the last bit. Nothing here knows
   Python: `library.py` calls these functions through ctypes. */

#ifndef ZBPP_LOOPS_H
#define ZBPP_LOOPS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define ZBPP_API __declspec(dllexport)
#else
#define ZBPP_API __attribute__((visibility("default")))
#endif

/* Results of the functions below. */
enum { DONE = 0, GIVEN_UP = 1, NO_MEMORY = -1 };

/* A time at which a stage decides; events come out by time, then by stage. */
typedef struct {
    double time;
    int64_t stage;
} Event;

typedef struct {
    Event *events;
    int64_t n, room;
} Heap;

static inline int is_before(Event one, Event other) {
    return one.time < other.time
        || (one.time == other.time && one.stage < other.stage);
}

static inline int heap_push(Heap *heap, double time, int64_t stage) {
    if (heap->n == heap->room) {
        int64_t room = heap->room ? 2 * heap->room : 256;
        Event *events = realloc(heap->events, (size_t)room * sizeof(Event));
        if (events == NULL) return 0;
        heap->events = events;
        heap->room = room;
    }
    Event event = {time, stage};
    int64_t at = heap->n++;
    while (at > 0 && is_before(event, heap->events[(at - 1) / 2])) {
        heap->events[at] = heap->events[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap->events[at] = event;
    return 1;
}

static inline Event heap_pop(Heap *heap) {
    Event first = heap->events[0], event = heap->events[--heap->n];
    int64_t at = 0;
    for (;;) {
        int64_t next = 2 * at + 1;
        if (next >= heap->n) break;
        if (next + 1 < heap->n
            && is_before(heap->events[next + 1], heap->events[next])) next++;
        if (!is_before(heap->events[next], event)) break;
        heap->events[at] = heap->events[next];
        at = next;
    }
    heap->events[at] = event;
    return first;
}

/* `PlacementProblem`: C chunks, 3C numbers; the names are those of its properties. */
typedef struct {
    int64_t n_microbatches, n_chunks, n_stages, is_plain;
    double tiny, target;
    const double *time, *change, *peak, *delay, *needs;
    const int64_t *stage;
    const int64_t *numbers; /* F and B numbers, stage by stage */
    const int64_t *first;   /* stage s: numbers[first[s]] to numbers[first[s + 1] - 1] */
    const uint8_t *joint;
    const double *work, *limits, *forward_limits, *all_forwards, *ample;
} Problem;

#endif
