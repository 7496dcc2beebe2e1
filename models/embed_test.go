package models_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/models"
)

func TestEmbeddingsComeInTheOrderOfTheTexts(t *testing.T) {
	t.Parallel()
	server := modeltest.NewEmbeddings(t, func(text string) []float32 { return []float32{float32(len(text)), 1} })
	client, err := models.New(models.Config{BaseURL: server.URL(), Model: "small", Headers: map[string]string{"Api-Key": "k"}})
	if err != nil {
		t.Fatal(err)
	}
	got, err := client.Embed(t.Context(), []string{"a", "bbb", "cc"})
	if err != nil || !slices.EqualFunc(got, []float32{1, 3, 2}, func(v []float32, first float32) bool { return v[0] == first }) {
		t.Errorf("got %v, %v", got, err)
	}
	if sent := server.Requests()[0]; sent.Model != "small" || sent.Header.Get("Api-Key") != "k" {
		t.Errorf("sent %+v", sent)
	}
	server.Refuse(func([]string) int { return http.StatusUnauthorized })
	_, err = client.Embed(t.Context(), []string{"a"})
	if said, ok := errors.AsType[*models.Error](err); !ok || said.Status != 401 || !strings.Contains(err.Error(), "AGENT_EMBEDDING_KEY") {
		t.Errorf("got %v", err)
	}
}

func TestAnAnswerThatIsNotOneEmbeddingForEachTextIsAnError(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]string{
		"chat answer":  `{"choices":[]}`,
		"too few":      `{"data":[{"index":0,"embedding":[1]}]}`,
		"same index":   `{"data":[{"index":0,"embedding":[1]},{"index":0,"embedding":[1]}]}`,
		"wrong index":  `{"data":[{"index":0,"embedding":[1]},{"index":7,"embedding":[1]}]}`,
		"empty vector": `{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":[]}]}`,
		"web page":     `<html>`,
		"other form":   `{"data":[{"index":0,"embedding":"AAAA"},{"index":1,"embedding":[1]}]}`,
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Write([]byte(answer))
		}))
		client, err := models.New(models.Config{BaseURL: server.URL, Model: "small"})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := client.Embed(t.Context(), []string{"a", "b"}); err == nil {
			t.Errorf("%s: got %v", name, got)
		}
		server.Close()
	}
}
