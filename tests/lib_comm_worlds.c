#include "lib_comm_worlds.h"
#include "lib_ranks.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include <cmocka.h>

static void
run_rank(const plan *p, int rank, int port)
{
    char text[32], host[2] = {p->hosts[rank], '\0'};
    snprintf(text, sizeof text, "%d", rank);
    setenv("RANK", text, 1);
    snprintf(text, sizeof text, "%zu", strlen(p->hosts));
    setenv("WORLD_SIZE", text, 1);
    snprintf(text, sizeof text, "%d", port);
    setenv("MASTER_PORT", text, 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("SPW_HOST", host, 1);
    p->body(p);
    exit(0);
}

static void
signal_all(const pid_t *pids, int count, int number)
{
    for (int r = 0; r < count; r++)
        kill(pids[r], number);
}

/*
 * As by Ctrl-Z and fg, or a scheduler. Of the 4.5 s that a rank is in its call, 1.5 s count as waiting: the stop itself
 * is one second to spw_waiting_look().
 */
static void
stop_all(const plan *p, const pid_t *pids, int count)
{
    for (int i = 0; *p->ready < count && i < 20000; i++)
        usleep(2000);
    usleep(300000);
    signal_all(pids, count, SIGSTOP);
    usleep(4000000);
    signal_all(pids, count - 1, SIGCONT);
    usleep(200000);
    kill(pids[count - 1], SIGCONT);
}

/* Forks the ranks and waits; all must end well but the one that is killed. Returns  how many did not. */
static int
run_at(plan p, int port)
{
    int count = p.present > 0 ? p.present : (int)strlen(p.hosts), bad = 0;
    pid_t pids[RANKS_MAX];
    time_t until;
    fflush(stdout);
    fflush(stderr);
    for (int r = 0; r < count; r++) {
        pids[r] = fork();
        assert_true(pids[r] >= 0);
        if (pids[r] == 0)
            run_rank(&p, r, port);
    }
    if (p.ready != NULL)
        stop_all(&p, pids, count);
    until = time(NULL) + 100;
    for (int r = 0; r < count; r++) {
        int status = 0;
        pid_t got;
        while ((got = waitpid(pids[r], &status, WNOHANG)) == 0 && time(NULL) < until)
            usleep(2000);
        if (got == 0) {
            fprintf(stderr, "rank %d of hosts %s does not end\n", r, p.hosts);
            kill(pids[r], SIGKILL);
            waitpid(pids[r], &status, 0);
            bad++;
        } else if (r == p.killed ? !WIFSIGNALED(status) : !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "rank %d of hosts %s ended with status %x\n", r, p.hosts, status);
            bad++;
        }
    }
    return bad;
}

void
plan_run(plan p)
{
    assert_int_equal(run_at(p, (int)ranks_port()), 0);
}

void
plans_run(const plan *worlds, int count)
{
    pid_t pids[WORLDS_MAX];
    int bad = 0;
    assert_true(count <= WORLDS_MAX);
    for (int i = 0; i < count; i++) {
        int port = (int)ranks_port();
        fflush(NULL);
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] == 0)
            _exit(run_at(worlds[i], port));
    }
    for (int i = 0; i < count; i++) {
        int status = 0;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        bad += status != 0;
    }
    assert_int_equal(bad, 0);
}

void
expect(const spw_error *e, spw_status st, const char *a, const char *b)
{
    CHECK(e->status == st && strstr(e->message, a) != NULL && strstr(e->message, b) != NULL, "%s %s (wanted %s, %s)",
          spw_status_name(e->status), e->message, a, b);
    if (getenv("SPW_TEST_SHOW") != NULL)
        fprintf(stderr, "# rank %s: %s %s\n", getenv("RANK"), spw_status_name(e->status), e->message);
}
