/*
 * How signals end a command: it stops at the next point where it can, and removes what it made. Asked for where that is worth
 * while; until then a signal ends the process, and the next one on the same path reclaims its swap files.
 */
#include "cli.h"
#include <signal.h>

volatile int cli_stop;
static _Atomic uint64_t stop_ns; /* when it was set */

/*
 * The first signal asks; one that comes a second later or more ends the process as it would end any other. Within a second it
 * is the same Ctrl-C: a terminal gives it to every process of the job, and what started this one passes it on.
 */
static void
on_signal(int number)
{
    if (cli_stop && spw_now_ns() - stop_ns >= 1000000000) {
        (void)signal(number, SIG_DFL);
        (void)raise(number);
    } else if (!cli_stop) {
        stop_ns = spw_now_ns();
        cli_stop = 1;
    }
}

/* Nobody reads the output any more, as with | head. What is said on the way to the end must not end it sooner. */
static void
on_pipe(int number)
{
    (void)number;
    if (!cli_stop)
        stop_ns = spw_now_ns();
    cli_stop = 1;
}

void
cli_catch_signals(void)
{
    struct sigaction action = {.sa_handler = on_signal}, pipe = {.sa_handler = on_pipe}, old;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL); /* Slurm's --signal, ahead of a job's end */
    sigaction(SIGPIPE, &pipe, NULL);
    if (sigaction(SIGHUP, NULL, &old) == 0 && old.sa_handler != SIG_IGN) /* nohup */
        sigaction(SIGHUP, &action, NULL);
}
