/*
 * lib_comm_worlds - worlds of ranks as processes of this machine, some of which pretend to be on other hosts, for tests of spw_comm.h: what a
 * rank checks ends that rank, and run() and plans_run() fail the running cmocka test unless all ranks end well.
 */
#ifndef LIB_COMM_WORLDS_H
#define LIB_COMM_WORLDS_H

#include "spw_comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { RANKS_MAX = 8, WORLDS_MAX = 4 };

/* In a rank: says what is wrong and ends it. */
#define CHECK(cond, ...)                                                                                               \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: rank %s: %s: ", __FILE__, __LINE__, getenv("RANK"), #cond);                        \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fprintf(stderr, "\n");                                                                                     \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)
#define OK(call)                                                                                                       \
    do {                                                                                                               \
        spw_error ok_err = {0}, *err = &ok_err;                                                                        \
        spw_status ok_st = (call);                                                                                     \
        CHECK(ok_st == SPW_OK, "%s %s", spw_status_name(ok_st), ok_err.message);                                       \
    } while (0)

#define AT_ONCE_NS 20000000000u /* on any machine, and not by a timeout of 60 s */
/* In a rank: e must be st, and say both. With SPW_TEST_SHOW it is shown, too. */
void expect(const spw_error *e, spw_status st, const char *a, const char *b);

typedef struct plan {
    const char *hosts; /* a letter per rank: which host it pretends to be on; its length is their number */
    void (*body)(const struct plan *plan);
    spw_comm_options options;
    int present; /* how many of them really start; 0: all */
    int variant;
    int killed; /* rank that ends by a signal, -1: none */
    _Atomic int
        *ready; /* not NULL: when all ranks have counted here, all are stopped for a while, and the last goes on last */
} plan;

void plan_run(plan p); /* forks the ranks and waits for them */
/* Worlds that do nothing but wait, at most WORLDS_MAX, beside each other. */
void plans_run(const plan *worlds, int count);

#endif
