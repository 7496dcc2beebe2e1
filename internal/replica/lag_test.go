package replica

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// A lag is the age of the newest position that the standby has replayed, whatever the age of its latest transaction.
func TestLagIsAgeOfReplayedPosition(t *testing.T) {
	t.Parallel()
	now := time.Now()
	hour := time.Hour
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, test := range map[string]struct {
		noted       []mark // the last one is the primary's present position
		standby     position
		away        bool
		least, most time.Duration
		known       bool
	}{
		"idle primary": {[]mark{{ago(2 * time.Second), 7}, {now, 7}}, position{Position: 7, Ago: &hour}, false, 0, 0, true},
		"all replayed": {[]mark{{ago(2 * time.Second), 7}, {now, 9}}, position{Position: 12, Ago: &hour}, false, 0, 0, true},
		"stands still": {
			[]mark{{ago(9 * time.Second), 7}, {now, 9}},
			position{Position: 7},
			false, 9 * time.Second,
			10 * time.Second, true,
		},
		"first look":    {[]mark{{now, 9}}, position{Position: 7, Ago: &hour}, false, hour, hour, true},
		"nothing known": {[]mark{{now, 9}}, position{Position: 7}, false, 0, time.Second, false},
		"primary away": {
			[]mark{{ago(5 * time.Second), 7}},
			position{Position: 7},
			true, 5 * time.Second, 6 * time.Second,
			true,
		},
		"another server": {[]mark{{ago(time.Second), 9}, {now, 3}}, position{Position: 3, Ago: &hour}, false, 0, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var m lagMeter
			for _, n := range test.noted {
				m.note(n.at, n.position)
			}
			behind, known := m.behind(now, test.standby, !test.away)
			assert.Truef(t, behind >= test.least && behind <= test.most && known == test.known,
				"%s behind, known %v; want %s to %s, known %v", behind, known, test.least, test.most, test.known)
		})
	}
}

// A standby that stands still for a day does not use memory for each second.
func TestLagMeterIsBounded(t *testing.T) {
	t.Parallel()
	var m lagMeter
	began := time.Now().Add(-24 * time.Hour)
	for i := range 24 * 60 * 60 {
		m.note(began.Add(time.Duration(i)*time.Second), int64(i))
	}
	assert.Equal(t, maxPending, len(m.pending))
	behind, known := m.behind(time.Now(), position{Position: 5}, true)
	assert.Truef(t, known && behind >= 23*time.Hour, "%s behind, known %v; want about a day", behind, known)
}
