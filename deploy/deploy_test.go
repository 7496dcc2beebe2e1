// Package deploy_test compares the files of this folder with the program: settings, ports, probes, times. Checks that
// need other tools (Dockerfile, Kubernetes, Helm, goreleaser) are in checks, a separate module: make prove
// ONLY=packages.
package deploy_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
)

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// files returns the files to deploy, by path.
func files(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{"../.goreleaser.yaml": read(t, "../.goreleaser.yaml")}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path == "checks":
			return fs.SkipDir
		case !d.IsDir() && !strings.HasSuffix(path, ".go"):
			all[path] = read(t, path)
		}
		return nil
	})
	require.Truef(t, err == nil && len(all) >= 12, "%d files: %v", len(all), err)
	return all
}

var variable = regexp.MustCompile(`\b(?:AGENT|DATABASE|OPENAI|LANEKEEPER)_[A-Z][A-Z_]*[A-Z]\b`)

// misnamed returns the variables in a text that the program does not read.
func misnamed(text string) []string {
	known := map[string]bool{}
	for _, s := range config.Settings() {
		known[s.Name] = true
		if s.Secret {
			known[s.Name+"_FILE"] = true
		}
	}
	var bad []string
	for _, name := range variable.FindAllString(text, -1) {
		if !known[name] {
			bad = append(bad, name)
		}
	}
	return bad
}

func TestEverySettingIsOneOfTheProgram(t *testing.T) {
	found := 0
	for path, text := range files(t) {
		found += len(variable.FindAllString(text, -1))
		for _, name := range misnamed(text) {
			t.Errorf("%s names %s, which the program does not read", path, name)
		}
	}
	assert.Truef(t, found >= 30, "%d settings in all files: the test does not see them", found)
	for _, wrong := range []string{"AGENT_DRAIN: 5s", "AGENT_LISTEN_FILE=x", "DATABASE_PASSWORD"} {
		assert.Equal(t, 1, len(misnamed(wrong)), wrong)
	}
}

// documents reads a YAML file without duplicate keys.
func documents(t *testing.T, path, text string) (all []map[string]any) {
	t.Helper()
	decoder := yaml.NewDecoder(strings.NewReader(text))
	for {
		var one map[string]any
		err := decoder.Decode(&one)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err, path)
		all = append(all, one)
	}
}

// at follows keys and indexes into a document. It returns nil if there is no value.
func at(v any, keys ...any) any {
	for _, key := range keys {
		switch key := key.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[key]
		case int:
			list, _ := v.([]any)
			if key >= len(list) {
				return nil
			}
			v = list[key]
		}
	}
	return v
}

func TestTheYAMLIsSound(t *testing.T) {
	for path, text := range files(t) {
		ext := filepath.Ext(path)
		assert.Truef(t, ext != ".yaml" || strings.Contains(path, "templates") || len(documents(t, path, text)) > 0,
			"%s has nothing in it", path)
	}
}

func duration(t *testing.T, text string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return d
}

// fallback returns the default of a setting.
func fallback(t *testing.T, name string) string {
	t.Helper()
	list := config.Settings()
	i := slices.IndexFunc(list, func(s config.Setting) bool { return s.Name == name })
	require.Truef(t, i >= 0, "there is no setting %s", name)
	return list[i].Default
}

// enough checks that a process gets the time for all stages of its stop, with the default of AGENT_SHUTDOWN_TIMEOUT.
func enough(t *testing.T, where string, drain, granted time.Duration) {
	t.Helper()
	// After the two timeouts, cut responses end with an error (5 s), the rest is cut off (5 s), and leases are released.
	needed := drain + 2*duration(t, fallback(t, "AGENT_SHUTDOWN_TIMEOUT")) + 15*time.Second
	assert.Truef(t, granted >= needed, "%s: the process is killed after %s, and may need %s", where, granted, needed)
}

func TestACompositionKeepsItsData(t *testing.T) {
	c := documents(t, "compose.yaml", read(t, "compose.yaml"))[0]
	image, _ := at(c, "services", "postgres", "image").(string)
	version, err := strconv.Atoi(strings.TrimPrefix(image, "postgres:"))
	assert.Truef(t, err == nil && version >= 18, "the image is %q", image)
	if got := at(c, "services", "postgres", "volumes", 0); got != "postgres:/var/lib/postgresql" {
		t.Errorf("PostgreSQL from 18 on keeps its data below /var/lib/postgresql; mounted is %v", got)
	}
	_, is := at(c, "volumes").(map[string]any)["postgres"]
	assert.True(t, is, "the volume is not declared")
	got := at(c, "services", "agent", "depends_on", "migrate", "condition")
	assert.Truef(t, got == "service_completed_successfully", "the agent starts when migrate is %v", got)
	env := at(c, "services", "agent", "environment")
	enough(t, "compose.yaml", duration(t, at(env, "AGENT_DRAIN_DELAY").(string)),
		duration(t, at(c, "services", "agent", "stop_grace_period").(string)))
}

func TestThePodsOfTheManifests(t *testing.T) {
	for _, d := range documents(t, "k8s", read(t, "k8s/lanekeeper.yaml")) {
		if d["kind"] != "Deployment" {
			continue
		}
		pod := at(d, "spec", "template", "spec")
		agent := at(pod, "containers", 0)
		env := map[string]string{}
		for _, e := range at(agent, "env").([]any) {
			env[at(e, "name").(string)], _ = at(e, "value").(string)
		}
		replicas, _ := at(d, "spec", "replicas").(int)
		assert.Truef(t, replicas >= 2, "%d replicas", replicas)
		if port, _ := at(agent, "ports", 0, "containerPort").(int); env["AGENT_LISTEN"] != "0.0.0.0:"+strconv.Itoa(port) {
			t.Errorf("it listens at %s, and the port is %d", env["AGENT_LISTEN"], port)
		}
		for probe, path := range map[string]string{
			"startupProbe": "/healthz", "livenessProbe": "/healthz",
			"readinessProbe": "/readyz",
		} {
			got := at(agent, probe, "httpGet", "path")
			assert.Truef(t, got == path, "%s asks %v, want %s", probe, got, path)
		}
		grace, _ := at(pod, "terminationGracePeriodSeconds").(int)
		enough(t, "k8s", duration(t, env["AGENT_DRAIN_DELAY"]), time.Duration(grace)*time.Second)
		return
	}
	t.Error("there is no Deployment")
}

// systemd, if installed, accepts the unit and rates it as hardened. The unit's times are long enough.
func TestTheUnit(t *testing.T) {
	unit := read(t, "systemd/lanekeeper.service")
	stop := regexp.MustCompile(`(?m)^TimeoutStopSec=(\S+)$`).FindStringSubmatch(unit)
	for _, line := range []string{"Type=notify", "ExecStart=/usr/bin/agent serve", "KillMode=mixed", "DynamicUser=yes"} {
		assert.Truef(t, strings.Contains(unit, "\n"+line+"\n"), "the unit has not %s", line)
	}
	require.True(t, stop != nil, "the unit has no TimeoutStopSec")
	enough(t, "lanekeeper.service", duration(t, fallback(t, "AGENT_DRAIN_DELAY")), duration(t, stop[1]))
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("there is no systemd-analyze here")
		return
	}
	program, err := exec.LookPath("true") // in place of the agent, which is not installed
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "lanekeeper.service")
	testkit.WriteFile(t, path, strings.ReplaceAll(unit, "/usr/bin/agent", program))
	if out, err := exec.Command(analyze, "verify", path).CombinedOutput(); err != nil || len(bytes.TrimSpace(out)) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	out, err := exec.Command(analyze, "security", "--offline=true", "--threshold=20", path).CombinedOutput()
	if err != nil && !strings.Contains(string(out), "unrecognized option") { // of systemd before 250
		t.Errorf("systemd-analyze security finds more than 2.0 of exposure: %v\n%s", err, out)
	}
}

// The next heartbeat is up to half an hour away after the first start and after a pause. During a pause, work waits.
func TestAlertsSpareAFreshOrPausedAgent(t *testing.T) {
	rules := map[string]map[string]any{}
	all := documents(t, "alerts.yaml", read(t, "monitoring/alerts.yaml"))
	for _, rule := range at(all[0], "groups", 0, "rules").([]any) {
		rules[at(rule, "alert").(string)] = rule.(map[string]any)
	}
	for _, name := range []string{"AgentHeartbeatLate", "AgentQueueStuck"} {
		assert.Contains(t, rules[name]["expr"].(string), "and max by (job) (agent_paused) == 0")
	}
	waits, ok := rules["AgentHeartbeatLate"]["for"].(string)
	assert.Truef(t, ok && duration(t, waits) > 30*time.Minute, "AgentHeartbeatLate waits for %q", waits)
}
