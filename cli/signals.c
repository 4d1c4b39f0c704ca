/*
 * How signals end a command: it stops at the next point where it can, and removes what it made. Asked for where that is worth
 * while; until then a signal ends the process.
 */
#include "cli.h"
#include <signal.h>

volatile int cli_stop, cli_unread;
static _Atomic uint64_t asked_ns; /* when it was, by who may end the process, too; 0: not yet */

/*
 * The first signal asks; one that comes a second later or more ends the process as it would end any other. Within a second it
 * is the same Ctrl-C: a terminal gives it to every process of the job, and what started this one passes it on.
 */
static void
on_signal(int number)
{
    uint64_t now = spw_now_ns();
    cli_stop = 1;
    if (asked_ns == 0) {
        asked_ns = now;
    } else if (now - asked_ns >= 1000000000) {
        (void)signal(number, SIG_DFL);
        (void)raise(number);
    }
}

/* Slurm's --signal, ahead of a job's end: the SIGTERM that comes with the end leaves what is being saved half a minute, and does not cut it off. */
static void
on_notice(int number)
{
    (void)number;
    cli_stop = 1;
}

/* Nobody reads the output any more, as with | head. What is said on the way to the end must not end it sooner. */
static void
on_pipe(int number)
{
    (void)number;
    if (asked_ns == 0)
        asked_ns = spw_now_ns();
    cli_stop = cli_unread = 1;
}

void
cli_catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal}, notice = {.sa_handler = on_notice};
    struct sigaction pipe = {.sa_handler = on_pipe}, old;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &notice, NULL);
    sigaction(SIGPIPE, &pipe, NULL);
    if (sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler != SIG_IGN) /* nohup */
        sigaction(SIGHUP, &action, NULL);
}
